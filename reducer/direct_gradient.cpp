#include "direct_gradient.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/internal/gradient_layout.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd_hooks.h"
#include "gradient_copy.h"
#include "gradient_kind.h"

namespace ddp {
namespace {

// Tensors on that storage which autograd itself drops before it reads anything again: while hooks
// run on a parameter, the gradient that they are called with, and what that one is a view of.
size_t dropped_by_autograd(const at::Tensor& grad) {
  const auto* incoming = incoming_gradient();
  // A sparse one has no storage: its bucket may have let others go that waited for it.
  if (incoming == nullptr || !incoming->has_storage() || incoming->use_count() > 1) return 0;
  if (!incoming->is_alias_of(grad)) return 0;
  return incoming->is_view() && incoming->_base().use_count() == 1 ? 2 : 1;
}

// Whether a hook of others may look at the gradient before the pass ends: it is to see this rank's.
bool is_watched(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return !accumulator || accumulator->post_hooks().size() != 1 ||
         torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
}

}  // namespace

std::atomic<size_t> DirectGradient::least_bytes{0};

bool DirectGradient::suits(const at::Tensor& parameter, const GradientMemory& memory) {
  const size_t least = least_bytes > 0 ? least_bytes.load() : memory.least_bytes();
  return parameter.is_cpu() && parameter.nbytes() >= least &&
         memory.reduces(parameter.scalar_type());
}

DirectGradient::DirectGradient(at::Tensor parameter, std::shared_ptr<GradientMemory> memory)
    : parameter_(std::move(parameter)),
      memory_(std::move(memory)),
      kind_(at::empty({}, parameter_.options().requires_grad(false)).expand(parameter_.sizes())),
      strides_(gradient_strides(parameter_)) {}

at::Tensor DirectGradient::shaped(const at::Tensor& wire) const {
  return alias(wire, wire.storage_offset(), kind_.sizes(), strides_);
}

// Autograd may still have use for a storage that others share: the same one goes to several nodes.
bool DirectGradient::can_send_in_place(const at::Tensor& grad) const {
  return !grad.requires_grad() && !grad.is_neg() && !grad.is_conj() &&
         grad.strides() == at::IntArrayRef(strides_) &&
         grad.storage().use_count() == 1 + dropped_by_autograd(grad) && memory_->contains(grad) &&
         !is_watched(parameter_);
}

std::string DirectGradient::pack(double scale, Send send) {
  // Of a pass that ended in an error: nothing came back.
  in_place_.reset();
  wire_.reset();
  const at::Tensor& grad = parameter_.mutable_grad();
  const bool fits = grad.defined() && is_like(grad, kind_);
  // A rank that has no say (no samples) has none with infinities either.
  const bool zeros = send == Send::Zeros || scale == 0 || !fits;
  if (!zeros && send == Send::Gradient && can_send_in_place(grad)) {
    in_place_ = grad;
    wire_ = alias(grad, grad.storage_offset(), {grad.numel()}, {1});
    scale_in_place(wire_, scale);
    return {};
  }
  wire_ = memory_->allocate(kind_.numel(), kind_.options());
  if (zeros) {
    wire_.zero_();
  } else {
    copy_scaled(shaped(wire_), grad, scale);
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
    // Behind autograd's back: an operation that saved it has to notice.
    grad.unsafeGetTensorImpl()->bump_version();
    return;
  }
  const auto reduced = shaped(wire);
  if (!grad.defined() || !is_like(grad, reduced)) {
    // One of another kind was a problem, and counted as zeros.
    grad = sent.defined() ? reduced.clone() : reduced;
  } else {
    copy_scaled(grad, reduced, 1.0);
    grad.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace ddp
