#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bucket_storage.h"

namespace ddp {

/// Where a bucket's gradients lie between two passes, and how they get there. `parameters` are the
/// bucket's, by slot.
///
/// Threads: as Bucket.
class GradientPlacement {
 public:
  virtual ~GradientPlacement() = default;

  /// From now on other code sees the storage: gradients are copied out of it.
  virtual void copy_only() {}

  /// Before gradients are packed: makes the storage free for them.
  ///
  /// \return whether it is another one now.
  virtual bool vacate(BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
    (void)storage, (void)parameters;
    return false;
  }

  /// Before a pass's gradients are put: `reduced`, 1-D, is what came back of the whole bucket.
  virtual void receive(const BucketStorage& storage, const at::Tensor& reduced) {
    (void)storage, (void)reduced;
  }
  /// Makes `grad`, of `slot`, what `reduced` holds for it.
  virtual void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced) = 0;

  /// Before the bucket goes: gradients that lie in its storage without being asked leave it.
  virtual void move_out(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
    (void)storage, (void)parameters;
  }
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
