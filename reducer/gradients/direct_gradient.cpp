#include "gradients/direct_gradient.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/internal/parameter_memory.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd/autograd_hooks.h"
#include "gradients/gradient_copy.h"

namespace ddp {
namespace {

// For the test of use_count() in can_send_in_place(): how many tensors besides `grad` keep its
// storage alive now and are gone before anything reads it again. While autograd calls a parameter's
// hooks, these are the gradient that it passes to them, and the base of which that one is a view.
size_t references_autograd_drops(const at::Tensor& grad) {
  const auto* incoming = incoming_gradient();
  // The incoming gradient may be a sparse one, without storage, whose bucket had to be launched
  // before this parameter's.
  if (incoming == nullptr || !incoming->has_storage() || incoming->use_count() > 1) return 0;
  if (!incoming->is_alias_of(grad)) return 0;
  return incoming->is_view() && incoming->_base().use_count() == 1 ? 2 : 1;
}

// Whether another hook may read the gradient before the pass ends: it must read this rank's own
// gradient, not a partly reduced one.
bool has_other_hooks(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return !accumulator || accumulator->post_hooks().size() != 1 ||
         torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
}

}  // namespace

std::atomic<size_t> DirectGradient::least_bytes{0};

bool DirectGradient::is_eligible(const at::Tensor& parameter, const GradientMemory& memory) {
  const size_t least = least_bytes > 0 ? least_bytes.load() : memory.least_bytes();
  return parameter.is_cpu() && parameter.nbytes() >= least &&
         memory.reduces(parameter.scalar_type());
}

DirectGradient::DirectGradient(at::Tensor parameter, std::shared_ptr<GradientMemory> memory)
    : parameter_(std::move(parameter)),
      memory_(std::move(memory)),
      kind_(at::empty({}, parameter_.options().requires_grad(false)).expand(parameter_.sizes())),
      strides_(gradient_strides(parameter_)) {}

at::Tensor DirectGradient::in_parameter_shape(const at::Tensor& wire) const {
  return alias(wire, wire.storage_offset(), kind_.sizes(), strides_);
}

// Autograd may still read a storage that other tensors share: it passes one gradient to several
// nodes.
bool DirectGradient::can_send_in_place(const at::Tensor& grad) const {
  return !grad.requires_grad() && !grad.is_neg() && !grad.is_conj() &&
         grad.strides() == at::IntArrayRef(strides_) &&
         grad.storage().use_count() == 1 + references_autograd_drops(grad) &&
         memory_->contains(grad) && !has_other_hooks(parameter_);
}

std::string DirectGradient::pack(double scale, Send send, FiniteCheck* check) {
  // A pass that ended in an error left them: it did not call unpack().
  in_place_.reset();
  wire_.reset();
  const at::Tensor& grad = parameter_.mutable_grad();
  const bool fits = grad.defined() && is_like(grad, kind_);
  // A rank with weight 0 (no samples) sends zeros, so that inf * 0 cannot become NaN.
  const bool zeros = send == Send::Zeros || scale == 0 || !fits;
  if (!zeros && send == Send::Gradient && can_send_in_place(grad)) {
    in_place_ = grad;
    wire_ = alias(grad, grad.storage_offset(), {grad.numel()}, {1});
    scale_in_place(wire_, scale, check);
    return {};
  }
  wire_ = memory_->allocate(kind_.numel(), kind_.options());
  if (zeros) {
    wire_.zero_();
  } else {
    copy_scaled(in_parameter_shape(wire_), grad, scale, check);
  }
  const bool counts = send != Send::Zeros && scale != 0 && grad.defined();
  return counts && !fits ? kind_difference(grad, kind_) : std::string();
}

void DirectGradient::unpack(bool keep) {
  const auto sent = std::exchange(in_place_, {});
  const auto wire = std::exchange(wire_, {});
  at::Tensor& grad = parameter_.mutable_grad();
  if (keep) return;
  if (sent.defined() && grad.is_same(sent)) {
    // The reduction wrote past autograd: an operation that saved `grad` must detect the change.
    grad.unsafeGetTensorImpl()->bump_version();
    return;
  }
  const auto reduced = in_parameter_shape(wire);
  if (!grad.defined() || !is_like(grad, reduced)) {
    // A gradient of another kind was reported as a problem, and counted as zeros: replace it.
    grad = sent.defined() ? reduced.clone() : reduced;
  } else {
    copy_scaled(grad, reduced, 1.0);
    grad.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace ddp
