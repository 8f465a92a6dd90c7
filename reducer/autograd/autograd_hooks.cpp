#include "autograd/autograd_hooks.h"

#include <utility>

#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {

using torch::autograd::variable_list;

namespace {

thread_local const at::Tensor* incoming = nullptr;

bool has_kind_of(const torch::autograd::Node& accumulator, const at::Tensor& parameter) {
  const auto& known = accumulator.input_metadata(0);
  return known.options().dtype() == parameter.dtype() && known.device() == parameter.device();
}

// Autograd keeps an accumulator of an earlier shape, and would refuse all gradients of this one.
NodePtr matching_accumulator(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  const auto known = impl::try_get_grad_accumulator(parameter);
  if (known &&
      !(has_kind_of(*known, parameter) && known->input_metadata(0).is_same_shape(parameter))) {
    impl::set_grad_accumulator(parameter, WeakNodePtr(NodePtr()));
  }
  return impl::grad_accumulator(parameter);
}

}  // namespace

const at::Tensor* incoming_gradient() { return incoming; }

/// On a parameter's gradient accumulator, before it accumulates.
class AutogradHooks::BeforeGradientHook : public torch::autograd::FunctionPreHook {
 public:
  BeforeGradientHook(AutogradEvents& events, size_t parameter)
      : events_(events), parameter_(parameter) {}

  variable_list operator()(const variable_list& gradients) override {
    events_.before_gradient(parameter_);
    return gradients;
  }

 private:
  AutogradEvents& events_;
  size_t parameter_;
};

/// On a parameter's gradient accumulator, after it has accumulated.
class AutogradHooks::GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(AutogradEvents& events, size_t parameter) : events_(events), parameter_(parameter) {}

  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    const bool defined = !gradients.empty() && gradients.front().defined();
    // A backward pass inside this one may run hooks on this thread.
    struct Restore {
      const at::Tensor* before;
      ~Restore() { incoming = before; }
    } restore{std::exchange(incoming, defined ? &gradients.front() : nullptr)};
    events_.on_gradient(parameter_, defined);
    return outputs;
  }

 private:
  AutogradEvents& events_;
  size_t parameter_;
};

/// On the node that made an output of forward.
class AutogradHooks::OutputHook : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(Events events) : events_(std::move(events)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (auto* events = *events_) events->on_output();
    return gradients;
  }

 private:
  Events events_;
};

bool is_averaged(const torch::autograd::Node& accumulator) {
  return any_of(accumulator.post_hooks(), [](const auto& hook) {
    return dynamic_cast<const AutogradHooks::GradientHook*>(hook.get()) != nullptr;
  });
}

AutogradHooks::AutogradHooks(const std::vector<NamedParameter>& parameters, AutogradEvents& events)
    : parameters_(parameters), events_(std::make_shared<AutogradEvents*>(&events)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    accumulators_.push_back(matching_accumulator(parameters[i].tensor));
    hooked_.push_back(hook(i));
    shapes_.emplace_back(parameters[i].tensor.sizes());
  }
}

AutogradHooks::Hooked AutogradHooks::hook(size_t parameter) {
  auto& accumulator = *accumulators_[parameter];
  auto before = std::make_unique<BeforeGradientHook>(**events_, parameter);
  const auto* address = before.get();
  accumulator.add_pre_hook(std::move(before));
  return {accumulator.add_post_hook(std::make_unique<GradientHook>(**events_, parameter)), address};
}

void AutogradHooks::unhook(size_t parameter) {
  const auto [after, before] = hooked_[parameter];
  accumulators_[parameter]->del_post_hook(after);
  auto& hooks = accumulators_[parameter]->pre_hooks();
  const auto is_mine = [before = before](const auto& hook) { return hook.get() == before; };
  drop_if(hooks, is_mine);
}

bool AutogradHooks::refresh() {
  using namespace torch::autograd;
  bool refreshed = false;
  for (size_t i = 0; i < accumulators_.size(); ++i) {
    const auto& parameter = parameters_[i].tensor;
    auto& mine = accumulators_[i];
    if (impl::try_get_grad_accumulator(parameter) == mine || !parameter.requires_grad()) continue;
    if (!has_kind_of(*mine, parameter)) continue;
    unhook(i);
    mine = impl::grad_accumulator(parameter);
    hooked_[i] = hook(i);
    refreshed = true;
  }
  return refreshed;
}

std::optional<size_t> AutogradHooks::reshaped() const {
  for (size_t i = 0; i < shapes_.size(); ++i) {
    if (parameters_[i].tensor.sizes() != at::IntArrayRef(shapes_[i])) return i;
  }
  return {};
}

AutogradHooks::~AutogradHooks() {
  *events_ = nullptr;
  for (size_t i = 0; i < accumulators_.size(); ++i) unhook(i);
}

void AutogradHooks::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    // A hook of the tensor comes before hooks of the program, which may throw. On the node, because
    // an output may be a parameter that is cast for the time of forward.
    output.grad_fn()->add_tensor_pre_hook(std::make_unique<OutputHook>(events_));
  }
}

bool AutogradHooks::accumulates() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!wanted || wanted->empty()) return true;
  return any_of(accumulators_, [&](const auto& accumulator) {
    const auto at = wanted->find(accumulator.get());
    return at != wanted->end() && at->second.needed_;
  });
}

bool AutogradHooks::watch_end(int64_t pass) {
  if (end_is_watched_.load(std::memory_order_relaxed) || end_is_watched_.exchange(true)) {
    return false;
  }
  at_backward_end(
      [this, events = events_] {
        if (!*events) return;
        end_is_watched_ = false;
        (*events)->on_backward_done();
      },
      [this, events = events_, pass](const std::exception_ptr& cause) {
        if (!*events) return;
        end_is_watched_ = false;
        (*events)->on_backward_failed(pass, cause);
      });
  return true;
}

}  // namespace ddp
