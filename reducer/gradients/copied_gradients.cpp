#include "gradients/copied_gradients.h"

#include "gradients/gradient_kind.h"

namespace ddp {

void CopiedGradients::put(
    at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
    ScaledCopies& copies) {
  const auto source = storage.view_into(reduced, slot);
  // A gradient of another kind was reported as a problem, and counted as zeros: replace it.
  if (!grad.defined() || !is_like(grad, source)) {
    grad = source.clone();
  } else {
    overwrite(grad, source, copies);
  }
}

}  // namespace ddp
