#include "low_precision_parameters.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

/// Gives a tensor that others hold another one's data and place in the graph. Its gradient, its
/// accumulator and its version counter stay: autograd notices a step between forward and backward.
void become(const at::Tensor& tensor, const at::Tensor& other) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
  impl::set_gradient_edge(tensor, {other.grad_fn(), static_cast<uint32_t>(other.output_nr())});
}

std::vector<at::Tensor> floating(std::vector<at::Tensor> parameters, at::ScalarType dtype) {
  const auto stays = [dtype](const at::Tensor& p) {
    return !p.is_floating_point() || p.scalar_type() == dtype;
  };
  parameters.erase(std::remove_if(parameters.begin(), parameters.end(), stays), parameters.end());
  return parameters;
}

}  // namespace

/// On the node that made an output of forward: a backward pass gets there before it gets to
/// anything that saved a parameter.
class LowPrecisionParameters::OutputHook : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<LowPrecisionParameters> parameters, CastsPtr casts)
      : parameters_(std::move(parameters)), casts_(std::move(casts)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto parameters = parameters_.lock()) parameters->begin_backward(casts_);
    return gradients;
  }

 private:
  const std::weak_ptr<LowPrecisionParameters> parameters_;
  const CastsPtr casts_;
};

/// On a parameter's accumulator of gradients, which wants a leaf. What used the parameter is done.
class LowPrecisionParameters::GradientHook : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::weak_ptr<LowPrecisionParameters> parameters, size_t parameter)
      : parameters_(std::move(parameters)), parameter_(parameter) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto parameters = parameters_.lock()) parameters->restore(parameter_);
    return gradients;
  }
  bool is_of(const LowPrecisionParameters& parameters) const {
    return parameters_.lock().get() == &parameters;
  }

 private:
  const std::weak_ptr<LowPrecisionParameters> parameters_;
  const size_t parameter_;
};

/// Travels with autograd's final callback, which autograd destroys uncalled when backward throws.
class LowPrecisionParameters::BackwardEnd {
 public:
  explicit BackwardEnd(std::weak_ptr<LowPrecisionParameters> parameters)
      : parameters_(std::move(parameters)) {}
  ~BackwardEnd() { act(); }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;

  void act() noexcept {
    if (const auto parameters = std::exchange(parameters_, {}).lock()) parameters->end_backward();
  }

 private:
  std::weak_ptr<LowPrecisionParameters> parameters_;
};

LowPrecisionParameters::LowPrecisionParameters(
    const std::vector<at::Tensor>& parameters, at::ScalarType dtype)
    : parameters_(floating(parameters, dtype)), dtype_(dtype), originals_(parameters_.size()) {}

void LowPrecisionParameters::begin_forward() {
  if (phase_ != Phase::Original) return;
  auto casts = std::make_shared<Casts>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    casts->push_back(parameters_[i].to(dtype_));
    if (casts->back().requires_grad()) hook_accumulator(i);
  }
  casts_ = std::move(casts);
  phase_ = Phase::Forward;  // also where substitute() throws
  substitute(*casts_);
}

void LowPrecisionParameters::hook_accumulator(size_t parameter) {
  const auto accumulator = impl::grad_accumulator(parameters_[parameter]);
  for (const auto& hook : accumulator->pre_hooks()) {
    const auto* known = dynamic_cast<const GradientHook*>(hook.get());
    if (known && known->is_of(*this)) return;
  }
  accumulator->add_pre_hook(std::make_unique<GradientHook>(weak_from_this(), parameter));
}

void LowPrecisionParameters::end_forward(const std::vector<at::Tensor>& outputs) {
  if (phase_ != Phase::Forward) return;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_pre_hook(std::make_unique<OutputHook>(weak_from_this(), casts_));
  }
  abandon_forward();
}

void LowPrecisionParameters::abandon_forward() noexcept {
  if (phase_ != Phase::Forward) return;
  casts_.reset();
  restore_all();
}

void LowPrecisionParameters::begin_backward(const CastsPtr& casts) {
  DDP_CHECK(
      !c10::GradMode::is_enabled(),
      "MixedPrecision: expected a backward pass without create_graph, got one with it. Wrap the "
      "model without mixed_precision where second derivatives are needed, and use autocast.");
  if (std::exchange(phase_, Phase::Backward) != Phase::Backward) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<BackwardEnd>(weak_from_this())] { end->act(); });
  }
  substitute(*casts);
}

void LowPrecisionParameters::end_backward() noexcept {
  if (phase_ == Phase::Backward) restore_all();
}

void LowPrecisionParameters::substitute(const Casts& casts) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (originals_[i].defined()) continue;
    originals_[i] = parameters_[i].variable_data();
    become(parameters_[i], casts[i]);
  }
}

void LowPrecisionParameters::restore(size_t parameter) noexcept {
  auto& original = originals_[parameter];
  if (!original.defined()) return;
  become(parameters_[parameter], original);
  original.reset();
}

void LowPrecisionParameters::restore_all() noexcept {
  for (size_t i = 0; i < parameters_.size(); ++i) restore(i);
  phase_ = Phase::Original;
}

}  // namespace ddp
