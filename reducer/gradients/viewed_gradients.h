#pragma once

#include "gradients/gradient_placement.h"

namespace ddp {

/// Gradients that always are views into the bucket's storage (gradient_as_bucket_view): user code
/// may rely on it.
class ViewedGradients final : public GradientPlacement {
 public:
  void after_pack(at::Tensor& grad, const BucketStorage& storage, size_t slot) override;
  void receive(const BucketStorage& storage, const at::Tensor& reduced) override;
  void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
      ScaledCopies& copies) override;
  void move_in(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) override;
};

}  // namespace ddp
