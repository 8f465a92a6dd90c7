#include "precision/low_precision_parameters.h"

#include <string>
#include <utility>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

/// Gives a gradient the dtype that the tensor had before the cast.
class CastBackward : public torch::autograd::Node {
 public:
  explicit CastBackward(at::ScalarType dtype) : dtype_(dtype) {}

  std::string name() const override { return "ddp::CastBackward"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {gradients[0].to(dtype_)};
  }

 private:
  const at::ScalarType dtype_;
};

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
  drop_if(parameters, stays);
  return parameters;
}

}  // namespace

std::vector<at::Tensor> cast_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  if (tensors.empty()) return {};
  std::vector<at::Tensor> casts;
  {
    const at::NoGradGuard no_grad;
    for (const auto& t : tensors) casts.push_back(at::empty_like(t, t.options().dtype(dtype)));
    at::_foreach_copy_(casts, tensors);
  }
  for (size_t i = 0; i < tensors.size() && c10::GradMode::is_enabled(); ++i) {
    if (!tensors[i].requires_grad()) continue;
    const auto node = std::make_shared<CastBackward>(tensors[i].scalar_type());
    node->add_next_edge(impl::gradient_edge(tensors[i]));
    torch::autograd::set_history(casts[i], node);
  }
  return casts;
}

void ParameterReaders::enter(Phase phase) {
  phase_ = phase;
  ++phase_changes_;
  last_change_ = Clock::now();
  changed_.notify_all();
}

// A forward pass inside a backward pass (recomputation) belongs to the training thread, even on
// autograd's thread. Between passes the optimizer may step, so another thread waits for a pause.
void ParameterReaders::check_thread(Lock& lock) {
  if (phase_ == Phase::Backward && torch::autograd::get_current_node()) return;
  const bool is_first = phase_changes_ == 0;
  if (phase_ != Phase::Backward && (is_first || is_training_thread())) return;
  DDP_CHECK(
      phase_ == Phase::Original && wait_for_pause(lock),
      "MixedPrecision: expected forward on one thread, got it on two within half a second. Give "
      "the thread that does not train a copy, model->snapshot().");
}

// Waits until half a second has passed without the begin or end of a pass. Returns false if one
// begins or ends before, or if one runs.
bool ParameterReaders::wait_for_pause(Lock& lock) {
  constexpr std::chrono::milliseconds kPause(500);
  const auto changes = phase_changes_;
  const auto is_disturbed = [this, changes] { return reads_allowed_ || phase_changes_ != changes; };
  return !changed_.wait_until(lock, last_change_ + kPause, is_disturbed) &&
         phase_ == Phase::Original;
}

void ParameterReaders::let_others_read(Lock& lock) {
  if (waiting_ == 0) return;
  reads_allowed_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return waiting_ == 0; });
  reads_allowed_ = false;
}

void ParameterReaders::read(Lock& lock, Versions versions, c10::function_ref<void()> read) {
  constexpr std::chrono::milliseconds kLook(100);
  const auto deadline = Clock::now() + std::chrono::minutes(10);
  if (is_training_thread()) return read();
  ++waiting_;
  const auto leave = c10::make_scope_exit([this] {
    --waiting_;
    changed_.notify_all();
  });
  while (Clock::now() < deadline) {
    const auto before = versions();
    const bool is_paused = wait_for_pause(lock);
    if (!reads_allowed_ && (!is_paused || versions() != before)) {
      // A backward pass may take longer than a pause: wait for its end.
      if (phase_ != Phase::Original) changed_.wait_for(lock, kLook);
      continue;
    }
    const bool is_safe = reads_allowed_;
    read();
    if (is_safe || versions() == before) return;
  }
  DDP_CHECK(
      false,
      "MixedPrecision: expected a backward pass, or a pause of the optimizer, within ten minutes, "
      "got none. Read parameters on the thread that trains.");
}

/// A hook on the node of each output of forward: a backward pass runs it before any node that saved
/// a parameter. Not a hook of the tensor: an output may be a parameter, which has a node in forward
/// alone.
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
    const auto end = [weak = weak_from_this()] {
      if (const auto parameters = weak.lock()) parameters->end_backward();
    };
    at_backward_end(end, [end](const std::exception_ptr& /*cause*/) { end(); });
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
  return c10::fmap(parameters_, [](const auto& parameter) { return parameter._version(); });
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
