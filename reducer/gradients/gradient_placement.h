#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "gradients/bucket_storage.h"

namespace ddp {

class ScaledCopies;

/// Decides in which memory a bucket's gradients are between two passes, and moves them there.
/// `parameters` are the packed ones, by slot of the storage.
///
/// Threads: as Bucket.
class GradientPlacement {
 public:
  virtual ~GradientPlacement() = default;

  /// Whether `.grad` has memory of its own between passes, whichever memory that is.
  virtual bool has_own_memory() const { return false; }

  /// Called after `grad`, of `slot`, was copied into the storage: it may give up its own memory.
  virtual void after_pack(at::Tensor& grad, const BucketStorage& storage, size_t slot) {
    (void)grad, (void)storage, (void)slot;
  }
  /// Called once before put(): `reduced`, 1-D, holds the reduced gradients of the whole bucket.
  virtual void receive(const BucketStorage& storage, const at::Tensor& reduced) {
    (void)storage, (void)reduced;
  }
  /// Makes `grad`, of `slot`, its part of `reduced`.
  ///
  /// \param copies  of scale 1, which the caller finishes after the last slot.
  virtual void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
      ScaledCopies& copies) = 0;

  /// Called after the buckets changed: moves gradients that live in bucket storage there.
  virtual void move_in(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
    (void)storage, (void)parameters;
  }
};

/// Gradients with memory of their own: averages are copied out of the bucket's storage.
std::unique_ptr<GradientPlacement> make_copied_gradients();

/// Gradients that always are views into the bucket's storage (gradient_as_bucket_view): user code
/// may rely on it.
std::unique_ptr<GradientPlacement> make_viewed_gradients();

}  // namespace ddp
