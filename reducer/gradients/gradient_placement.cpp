#include "gradients/gradient_placement.h"

#include "gradients/gradient_copy.h"

namespace ddp {

at::Tensor GradientPlacement::share_memory(const at::Tensor& view) {
  return at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

void GradientPlacement::overwrite(
    const at::Tensor& grad, const at::Tensor& reduced, ScaledCopies& copies) {
  copies.copy(grad, reduced);
  grad.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ddp
