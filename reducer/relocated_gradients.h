#pragma once

#include "gradient_placement.h"

namespace ddp {

/// Gradients that user code may treat as if they had memory of their own. Small ones have. A large
/// one is not copied out of the storage after a pass: its tensor is moved into the storage.
///
/// What keeps that from showing: a gradient of which there is another view is copied to instead;
/// gradients that are still in the storage when the next pass packs move out first; and storage in
/// which user code holds an older gradient is left to it, while the bucket takes other memory.
/// What shows is where the memory lies: a raw pointer into a gradient is good until the end of the
/// pass, and a gradient's `storage()` is the whole bucket's.
class RelocatedGradients final : public GradientPlacement {
 public:
  explicit RelocatedGradients(bool copies_only) : copies_only_(copies_only) {}

  void copy_only() override { copies_only_ = true; }
  bool vacate(BucketStorage& storage, const std::vector<at::Tensor>& parameters) override;
  void put(at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced)
      override;
  void move_out(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) override;

 private:
  // No gradient is moved into the storage: other code sees the storage, or gradients outlive
  // passes, where to copy costs less than to move in and out.
  bool copies_only_;
};

}  // namespace ddp
