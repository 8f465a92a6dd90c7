#include "gradients/gradient_placement.h"

#include "gradients/gradient_copy.h"

namespace ddp {
namespace {

// Another tensor on the memory of `view`: changes to one tensor object (detach_, requires_grad_) do
// not affect the other.
at::Tensor share_memory(const at::Tensor& view) {
  return at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

// Copies `reduced` into `grad`, and bumps its version, so that an operation that saved `grad`
// detects the change.
void overwrite_gradient(const at::Tensor& grad, const at::Tensor& reduced, ScaledCopies& copies) {
  copies.copy(grad, reduced);
  grad.unsafeGetTensorImpl()->bump_version();
}

class CopiedGradients final : public GradientPlacement {
 public:
  bool has_own_memory() const override { return true; }

  void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
      ScaledCopies& copies) override {
    const auto source = storage.view_into(reduced, slot);
    // A gradient of another kind was reported as a problem, and counted as zeros: replace it.
    if (!grad.defined() || !is_like(grad, source)) {
      grad = source.clone();
    } else {
      overwrite_gradient(grad, source, copies);
    }
  }
};

class ViewedGradients final : public GradientPlacement {
 public:
  void after_pack(at::Tensor& grad, const BucketStorage& storage, size_t slot) override {
    // Now, not after the reduction: else all gradients would be held twice at the end of a pass.
    if (!grad.requires_grad() && !storage.has_in_place(slot, grad)) {
      grad = share_memory(storage.views()[slot]);
    }
  }

  void receive(const BucketStorage& storage, const at::Tensor& reduced) override {
    if (reduced.const_data_ptr() == storage.all().const_data_ptr()) return;
    storage.gradients().copy_(reduced);
  }

  void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& /*reduced*/,
      ScaledCopies& copies) override {
    const auto& view = storage.views()[slot];
    if (grad.defined() && storage.has_in_place(slot, grad)) return;
    // With create_graph a gradient has a graph of its own, which an alias would lose.
    if (grad.defined() && grad.requires_grad() && is_like(grad, view)) {
      overwrite_gradient(grad, view, copies);
    } else {
      grad = share_memory(view);
    }
  }

  void move_in(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) override {
    for (size_t slot = 0; slot < parameters.size(); ++slot) {
      const auto& view = storage.views()[slot];
      at::Tensor& grad = parameters[slot].mutable_grad();
      if (!grad.defined() || grad.scalar_type() != view.scalar_type()) continue;
      if (grad.requires_grad()) continue;  // it has a graph of its own, which an alias would lose
      copy_scaled(view, grad, 1.0);
      grad = share_memory(view);
    }
  }
};

}  // namespace

std::unique_ptr<GradientPlacement> make_copied_gradients() {
  return std::make_unique<CopiedGradients>();
}

std::unique_ptr<GradientPlacement> make_viewed_gradients() {
  return std::make_unique<ViewedGradients>();
}

}  // namespace ddp
