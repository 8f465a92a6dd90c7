// The gradients of one rank in one pass that are not finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "buckets/bucket.h"
#include "status/problem_report.h"

namespace ddp {

/// Finds the parameters whose gradients are infinite or NaN on this rank, before a reduction gives
/// them to the others. On a device it queues the search with the pass, and waits only in problem().
///
/// Threads: as Bucket.
class NonfiniteGradients {
 public:
  void clear();

  /// Where Bucket::pack() adds what it found on the CPU.
  std::vector<size_t>& on_host() { return on_host_; }
  /// Queues the search among a packed bucket's gradients on a device.
  ///
  /// \param used  by parameter, over all buckets; null: all are used.
  void search(const Bucket& bucket, const std::vector<char>* used);

  /// One number on `like`'s device, in its dtype: 1 where a gradient on a device is not finite,
  /// else 0. Undefined where no gradient is on a device. Waits only where `like` is on the CPU.
  at::Tensor device_flag(const at::Tensor& like) const;

  /// The problem of backward pass `pass`; none where all gradients are finite.
  ///
  /// Blocks: host, until the devices have found them.
  std::optional<Problem> problem(int64_t pass, const std::vector<NamedParameter>& parameters) const;

 private:
  /// Gradients of one bucket on a device.
  struct Queued {
    std::vector<size_t> parameters;
    at::Tensor largest;  // by parameter: the largest magnitude, which is NaN where a number is
  };

  std::vector<size_t> on_host_;  // indices, in the order in which buckets are sent
  std::vector<Queued> queued_;   // in the same order
};

}  // namespace ddp
