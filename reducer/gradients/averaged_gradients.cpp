#include "gradients/averaged_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/count_nonzero.h>

namespace ddp {
namespace {

bool is_zero(const at::Tensor& t) {
  const auto& values = t.is_sparse() ? t._values() : t;
  return values.count_nonzero().item<int64_t>() == 0;
}

}  // namespace

at::Tensor& AveragedGradients::grad_of(size_t parameter) const {
  return parameters_[parameter].tensor.mutable_grad();
}

// The weak reference keeps the address from another tensor.
bool AveragedGradients::is_in_grad(size_t parameter) const {
  const at::Tensor& grad = grad_of(parameter);
  return grad.defined() &&
         slots_[parameter].grad._unsafe_get_target() == grad.unsafeGetTensorImpl();
}

void AveragedGradients::see(size_t parameter, State state) {
  const at::Tensor& grad = grad_of(parameter);
  auto& slot = slots_[parameter];
  slot.state = state;
  slot.grad = WeakTensor(grad.getIntrusivePtr());
  slot.version = grad._version();
}

bool AveragedGradients::any() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    if (slot.state == State::None) continue;
    const at::Tensor& grad = grad_of(i);
    if (slot.state == State::SetAside) {
      if (!is_zero(slot.average)) return true;
    } else if (is_in_grad(i) && (grad._version() == slot.version || !is_zero(grad))) {
      return true;
    }
  }
  return false;
}

bool AveragedGradients::before_gradient(size_t parameter, bool is_reduced) {
  auto& slot = slots_[parameter];
  if (slot.state == State::None || slot.state == State::SetAside) return true;
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = grad_of(parameter);
  const bool is_in = is_in_grad(parameter);
  const bool is_changed = is_in && grad._version() != slot.version;
  const bool is_part = slot.state == State::Part;
  // Zeros need not be set aside. On a device it costs less to do it than to look at them.
  bool is_cleared = !is_in || (is_changed && (is_part || grad.is_cpu()) && is_zero(grad));
  if (is_cleared || (is_changed && is_part)) {
    is_cleared = is_cleared || is_zero(slot.average);
    slot = Slot();
    return is_cleared;
  }
  if (is_reduced) {
    set_aside(parameter);
  } else if (slot.state == State::Whole) {
    slot.average = grad.clone();
    slot.state = State::Part;
  }
  return true;
}

void AveragedGradients::set_aside(size_t parameter) {
  auto& slot = slots_[parameter];
  at::Tensor& grad = grad_of(parameter);
  if (slot.state == State::Part) {
    grad.sub_(slot.average);
  } else if (as_views_) {
    slot.average = grad.clone();
    grad.zero_();
  } else {
    slot.average = std::exchange(grad, {});
  }
  slot.state = State::SetAside;
}

void AveragedGradients::after_local_gradient(size_t parameter) {
  if (slots_[parameter].state == State::Part) see(parameter, State::Part);
}

void AveragedGradients::add_back(size_t parameter, bool is_used) {
  auto& slot = slots_[parameter];
  at::Tensor& grad = grad_of(parameter);
  const auto average = std::exchange(slot.average, {});
  if (!average.defined()) {
    if (is_used && grad.defined()) see(parameter, State::Whole);
    return;
  }
  if (!grad.defined()) {
    grad = average;
  } else if (grad.requires_grad()) {
    // With create_graph the sum has the graphs of both.
    const at::AutoGradMode with_grad(true);
    grad = average + grad;
  } else if (average.unsafeGetTensorImpl() == slot.grad._unsafe_get_target()) {
    grad = average.add_(grad);  // the program's tensor stays in `.grad`
  } else {
    grad.add_(average);
  }
  see(parameter, State::Whole);
}

void AveragedGradients::keep_through(const std::function<void()>& change) {
  std::vector<size_t> kept;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    const bool is_changed =
        slot.state == State::Part && is_in_grad(i) && grad_of(i)._version() != slot.version;
    if (slot.state != State::SetAside && is_in_grad(i) && !is_changed) kept.push_back(i);
  }
  change();
  for (const auto i : kept) see(i, slots_[i].state);
}

void AveragedGradients::drop() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == State::Part && is_in_grad(i)) grad_of(i).sub_(slots_[i].average);
  }
  forget();
}

void AveragedGradients::forget() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    auto slot = std::exchange(slots_[i], Slot());
    if (slot.state == State::SetAside && !as_views_) grad_of(i) = std::move(slot.average);
  }
}

}  // namespace ddp
