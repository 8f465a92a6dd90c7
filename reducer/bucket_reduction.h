#pragma once

#include <memory>
#include <optional>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <ddp/comm_hooks.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bucket.h"

namespace ddp {

/// How one bucket becomes its reduced self.
class BucketReduction {
 public:
  /// A bucket under way: one of the two, or none in a group of one.
  struct InFlight {
    c10::intrusive_ptr<c10d::Work> work;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  virtual ~BucketReduction() = default;

  /// What gradients are multiplied by as they are packed.
  ///
  /// \param scale  as in PassTerms.
  virtual double scale_of(const Bucket& bucket, const std::optional<double>& scale) const = 0;

  /// Whether numbers behind the gradients of `bucket` come back as their sum, or their average.
  virtual bool carries_status(const Bucket& bucket) const = 0;

  /// Whether a bucket comes back as it was packed: there is nobody to reduce it with.
  virtual bool returns_as_packed() const { return false; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// What has to end before another bucket is packed, if anything; asked for once.
  virtual WorkPtr in_the_way() { return {}; }

  /// Starts the reduction of a packed bucket, without waiting.
  virtual InFlight start(
      const Bucket& bucket, size_t index, bool is_last, const std::optional<double>& scale) = 0;
};

/// An all-reduce: by default the mean over the ranks.
///
/// \param device  of the parameters.
std::unique_ptr<BucketReduction> make_all_reduction(ProcessGroup group, c10::Device device);

/// A communication hook of the user's.
std::unique_ptr<BucketReduction> make_hook_reduction(CommHook hook);

}  // namespace ddp
