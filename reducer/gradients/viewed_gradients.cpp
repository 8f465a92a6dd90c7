#include "gradients/viewed_gradients.h"

#include "gradients/gradient_copy.h"
#include "gradients/gradient_kind.h"

namespace ddp {

void ViewedGradients::after_pack(at::Tensor& grad, const BucketStorage& storage, size_t slot) {
  // Now, not after the reduction: else all gradients would be held twice at the end of a pass.
  if (!grad.requires_grad() && !storage.has_in_place(slot, grad)) {
    grad = share_memory(storage.views()[slot]);
  }
}

void ViewedGradients::receive(const BucketStorage& storage, const at::Tensor& reduced) {
  if (reduced.const_data_ptr() == storage.all().const_data_ptr()) return;
  storage.gradients().copy_(reduced);
}

void ViewedGradients::put(
    at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& /*reduced*/,
    ScaledCopies& copies) {
  const auto& view = storage.views()[slot];
  if (grad.defined() && storage.has_in_place(slot, grad)) return;
  // With create_graph a gradient has a graph of its own, which an alias would lose.
  if (grad.defined() && grad.requires_grad() && is_like(grad, view)) {
    overwrite(grad, view, copies);
  } else {
    grad = share_memory(view);
  }
}

void ViewedGradients::move_in(
    const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
  for (size_t slot = 0; slot < parameters.size(); ++slot) {
    const auto& view = storage.views()[slot];
    at::Tensor& grad = parameters[slot].mutable_grad();
    if (!grad.defined() || grad.scalar_type() != view.scalar_type()) continue;
    if (grad.requires_grad()) continue;  // it has a graph of its own, which an alias would lose
    copy_scaled(view, grad, 1.0);
    grad = share_memory(view);
  }
}

}  // namespace ddp
