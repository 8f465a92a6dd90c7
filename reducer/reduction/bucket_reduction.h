#pragma once

#include <memory>
#include <optional>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <ddp/comm_hooks.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "buckets/bucket.h"

namespace ddp {

/// Reduces packed buckets over the ranks.
class BucketReduction {
 public:
  /// A running reduction: one of the two, or neither in a group of one.
  struct InFlight {
    c10::intrusive_ptr<c10d::Work> work;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  virtual ~BucketReduction() = default;

  /// The factor by which gradients are multiplied as they are packed.
  ///
  /// \param scale  as in PassTerms.
  virtual double scale_of(const Bucket& bucket, const std::optional<double>& scale) const = 0;

  /// Whether the reduction also sums, or averages, numbers after the gradients of `bucket`.
  virtual bool carries_status(const Bucket& bucket) const = 0;

  /// Whether the reduction leaves a bucket as it was packed, as in a group of one.
  virtual bool returns_as_packed() const { return false; }

  /// Bucket b has the memory of bucket b - buffers(), and is packed after that one's reduction; 0:
  /// each has its own.
  virtual size_t buffers() const { return 0; }

  /// Starts the reduction of a packed bucket, without waiting.
  virtual InFlight start(
      const Bucket& bucket, size_t index, bool is_last, const std::optional<double>& scale) = 0;
};

/// Whether a collective may divide by the number of ranks itself. It may multiply by 1 / ranks as a
/// number of the tensors' dtype, which for bfloat16 and three ranks is 0.2 % off.
bool averages_exactly(at::ScalarType dtype, int ranks);

/// An all-reduce: by default the mean over the ranks.
///
/// \param device  of the parameters.
std::unique_ptr<BucketReduction> make_all_reduction(ProcessGroup group, c10::Device device);

std::unique_ptr<BucketReduction> make_hook_reduction(CommHook hook);

/// All-reduces gradients that are cast to a dtype of fewer bits.
std::unique_ptr<BucketReduction> make_reduction_in(at::ScalarType dtype, ProcessGroup group);

/// Starts such an all-reduce; complex and sparse gradients keep their dtype.
///
/// \param scale  as in PassTerms.
/// \return  the bucket's buffer, with the result.
c10::intrusive_ptr<c10::ivalue::Future> all_reduce_in(
    at::ScalarType dtype, GradBucket& bucket, const ProcessGroup& group,
    const std::optional<double>& scale = {});

}  // namespace ddp
