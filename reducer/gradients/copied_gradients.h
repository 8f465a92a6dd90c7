#pragma once

#include "gradients/gradient_placement.h"

namespace ddp {

/// Gradients with memory of their own: averages are copied out of the bucket's storage.
class CopiedGradients final : public GradientPlacement {
 public:
  bool has_own_memory() const override { return true; }
  void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
      ScaledCopies& copies) override;
};

}  // namespace ddp
