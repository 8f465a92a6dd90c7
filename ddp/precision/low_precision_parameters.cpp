#include "precision/low_precision_parameters.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "precision/casts.h"

namespace ddp {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

/// Gives a tensor that modules and optimizers hold the data and the graph edge of `other`. Its
/// gradient, its accumulator and its version counter stay, so autograd still detects a step between
/// forward and backward.
void take_data_and_edge(const at::Tensor& tensor, const at::Tensor& other) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
  impl::set_gradient_edge(tensor, {other.grad_fn(), static_cast<uint32_t>(other.output_nr())});
}

std::vector<at::Tensor> parameters_to_cast(
    std::vector<at::Tensor> parameters, at::ScalarType dtype) {
  const auto stays = [dtype](const at::Tensor& p) {
    return !p.is_floating_point() || p.scalar_type() == dtype;
  };
  parameters.erase(std::remove_if(parameters.begin(), parameters.end(), stays), parameters.end());
  return parameters;
}

}  // namespace

/// A hook on the node of each output of forward: a backward pass runs it before any node that saved
/// a parameter.
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

/// A hook on a parameter's gradient accumulator, which requires a leaf. All nodes that used the
/// parameter have run by then.
class LowPrecisionParameters::GradientHook : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::weak_ptr<LowPrecisionParameters> parameters, size_t parameter)
      : parameters_(std::move(parameters)), parameter_(parameter) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto parameters = parameters_.lock()) parameters->restore(parameter_);
    return gradients;
  }
  bool belongs_to(const LowPrecisionParameters& parameters) const {
    return parameters_.lock().get() == &parameters;
  }

 private:
  const std::weak_ptr<LowPrecisionParameters> parameters_;
  const size_t parameter_;
};

/// Held by autograd's final callback. When backward throws, autograd destroys the callback without
/// a call, so the destructor ends the pass too.
class LowPrecisionParameters::BackwardEnd {
 public:
  explicit BackwardEnd(std::weak_ptr<LowPrecisionParameters> parameters)
      : parameters_(std::move(parameters)) {}
  ~BackwardEnd() { run(); }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;

  void run() noexcept {
    if (const auto parameters = std::exchange(parameters_, {}).lock()) parameters->end_backward();
  }

 private:
  std::weak_ptr<LowPrecisionParameters> parameters_;
};

LowPrecisionParameters::LowPrecisionParameters(
    const std::vector<at::Tensor>& parameters, at::ScalarType dtype)
    : parameters_(parameters_to_cast(parameters, dtype)),
      dtype_(dtype),
      originals_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    indices_[parameters_[i].unsafeGetTensorImpl()] = i;
  }
}

void LowPrecisionParameters::begin_forward() {
  std::unique_lock<std::mutex> lock(mutex_);
  readers_.check_thread(lock);
  if (readers_.phase() != Phase::Original) return;
  readers_.set_training_thread();
  casts_.reset();
  auto casts = std::make_shared<Casts>(cast_all(parameters_, dtype_));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if ((*casts)[i].requires_grad()) hook_accumulator(i);
  }
  casts_ = std::move(casts);
  readers_.enter(Phase::Forward);  // before, in case substitute() throws
  substitute(casts_);
}

void LowPrecisionParameters::hook_accumulator(size_t parameter) {
  const auto accumulator = impl::grad_accumulator(parameters_[parameter]);
  for (const auto& hook : accumulator->pre_hooks()) {
    const auto* known = dynamic_cast<const GradientHook*>(hook.get());
    if (known && known->belongs_to(*this)) return;
  }
  accumulator->add_pre_hook(std::make_unique<GradientHook>(weak_from_this(), parameter));
}

void LowPrecisionParameters::end_forward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (readers_.phase() != Phase::Forward) return;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_tensor_pre_hook(std::make_unique<OutputHook>(weak_from_this(), casts_));
  }
  restore_all();
}

void LowPrecisionParameters::abandon_forward() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (readers_.phase() != Phase::Forward || !readers_.is_training_thread()) return;
  restore_all();
}

std::vector<at::Tensor> LowPrecisionParameters::originals(std::vector<at::Tensor> tensors) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& tensor : tensors) tensor = value_of(tensor);
  return tensors;
}

void LowPrecisionParameters::begin_backward(const CastsPtr& casts) {
  DDP_CHECK(
      !c10::GradMode::is_enabled(),
      "MixedPrecision: expected a backward pass without create_graph, got one with it. Wrap the "
      "model without mixed_precision where second derivatives are needed, and use autocast.");
  std::unique_lock<std::mutex> lock(mutex_);
  if (readers_.phase() != Phase::Backward) {
    readers_.enter(Phase::Backward);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<BackwardEnd>(weak_from_this())] { end->run(); });
    readers_.let_others_read(lock);
  }
  substitute(casts);
}

void LowPrecisionParameters::read(const std::function<void(const ValueOf&)>& read) {
  const ValueOf value = [this](const at::Tensor& tensor) { return value_of(tensor); };
  std::unique_lock<std::mutex> lock(mutex_);
  readers_.read(
      lock, [this] { return versions(); }, [&] { read(value); });
}

bool LowPrecisionParameters::may_read_directly() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return readers_.is_training_thread();
}

at::Tensor LowPrecisionParameters::value_of(const at::Tensor& tensor) const {
  const auto found = indices_.find(tensor.unsafeGetTensorImpl());
  if (found == indices_.end() || !originals_[found->second].defined()) return tensor.detach();
  return originals_[found->second];
}

// An optimizer's step raises these.
std::vector<int64_t> LowPrecisionParameters::versions() const {
  std::vector<int64_t> versions;
  for (const auto& parameter : parameters_) versions.push_back(parameter._version());
  return versions;
}

void LowPrecisionParameters::end_backward() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (readers_.phase() == Phase::Backward) restore_all();
}

void LowPrecisionParameters::substitute(const CastsPtr& casts) {
  in_place_ = casts;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!originals_[i].defined()) substitute_one(i);
  }
}

void LowPrecisionParameters::substitute_one(size_t parameter) {
  originals_[parameter] = parameters_[parameter].variable_data();
  take_data_and_edge(parameters_[parameter], (*in_place_)[parameter]);
}

void LowPrecisionParameters::with_originals(c10::function_ref<void()> act) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<size_t> replaced;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (originals_[i].defined()) replaced.push_back(i);
    restore_one(i);
  }
  act();
  for (const auto i : replaced) substitute_one(i);
}

void LowPrecisionParameters::restore_one(size_t parameter) noexcept {
  auto& original = originals_[parameter];
  if (!original.defined()) return;
  take_data_and_edge(parameters_[parameter], original);
  original.reset();
}

void LowPrecisionParameters::restore(size_t parameter) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  restore_one(parameter);
}

void LowPrecisionParameters::restore_all() noexcept {
  for (size_t i = 0; i < parameters_.size(); ++i) restore_one(i);
  in_place_.reset();
  readers_.enter(Phase::Original);
}

}  // namespace ddp
