#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bucket_storage.h"

namespace ddp {

/// Where a bucket's gradients lie between two passes, and how they get there. `parameters` are
/// those that are packed, by slot of the storage.
///
/// Threads: as Bucket.
class GradientPlacement {
 public:
  virtual ~GradientPlacement() = default;

  /// Whether `.grad` has memory of its own between passes: any that it has.
  virtual bool leaves_memory() const { return false; }

  /// Behind the copy of `grad`, of `slot`, into the storage: it need not keep memory of its own.
  virtual void packed(at::Tensor& grad, const BucketStorage& storage, size_t slot) {
    (void)grad, (void)storage, (void)slot;
  }
  /// Before a pass's gradients are put: `reduced`, 1-D, is what came back of the whole bucket.
  virtual void receive(const BucketStorage& storage, const at::Tensor& reduced) {
    (void)storage, (void)reduced;
  }
  /// Makes `grad`, of `slot`, what `reduced` holds for it.
  virtual void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced) = 0;

  /// After the buckets changed: gradients that belong into storage move there.
  virtual void move_in(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
    (void)storage, (void)parameters;
  }

 protected:
  /// Another tensor on the memory of `view`: what is done to one as an object (detach_,
  /// requires_grad_) does not reach the other.
  static at::Tensor share_memory(const at::Tensor& view);
  /// Copies behind autograd's back: an operation that saved `grad` has to notice.
  static void overwrite(const at::Tensor& grad, const at::Tensor& reduced);
};

}  // namespace ddp
