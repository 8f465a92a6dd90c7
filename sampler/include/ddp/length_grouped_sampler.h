#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/export.h>
#include <ddp/sharded_sampler.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `DistributedLengthGroupedSampler`; every rank must pass the same, but for `rank`.
struct DistributedLengthGroupedSamplerOptions {
  /// Options with this batch size.
  explicit DistributedLengthGroupedSamplerOptions(int64_t batch_size) : batch_size_(batch_size) {}

  /// Samples in a batch of one rank, >= 1: the data loader's batch size.
  TORCH_ARG(int64_t, batch_size);
  /// Steps (one batch on each rank) whose samples are sorted together, >= 1. A larger number makes
  /// the lengths within a batch more alike, and the batches less random. Default: 50
  TORCH_ARG(int64_t, batches_per_bucket) = 50;
  /// Number of ranks that share the dataset, >= 1. Default: the size of the default group
  TORCH_ARG(std::optional<int64_t>, num_replicas) = {};
  /// This process's number among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
  /// Fill the buckets and order the batches at random, anew in each epoch. Default: true
  TORCH_ARG(bool, shuffle) = true;
  /// Seed of the shuffled orders. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// Drop the last step where it would not be full on every rank, instead of filling it with
  /// repeated samples. It holds the longest samples of the last bucket. Default: false
  TORCH_ARG(bool, drop_last) = false;
  /// As DistributedSamplerOptions::advance_epoch. Default: false
  TORCH_ARG(bool, advance_epoch) = false;
};

/// Batches of samples of similar length (sentences, sounds), so that a batch needs little padding
/// and all ranks have about the same work in a step.
///
/// The shuffled dataset is cut into buckets of `batches_per_bucket` steps, each bucket is sorted by
/// length and cut into steps of batch_size * num_replicas samples, and the steps are shuffled. Rank
/// r gets samples r, r + num_replicas, ... of each step. The one step that is not full comes last.
///
/// After `load` on another number of ranks the rest of the epoch keeps the saved order; a step may
/// then hold samples of two of its groups.
///
/// Example:
/// ```
/// ddp::DistributedLengthGroupedSampler sampler(
///     lengths, ddp::DistributedLengthGroupedSamplerOptions(/*batch_size=*/32));
/// auto loader = torch::data::make_data_loader(dataset, sampler, /*options=*/32);
/// ```
class DDP_API DistributedLengthGroupedSampler : public ShardedSampler {
 public:
  /// \param lengths  one for each sample of the dataset, in any unit.
  /// \throws c10::ValueError  batch_size or batches_per_bucket < 1; and as `DistributedSampler`'s.
  ///
  /// Collective: no. Cost of an epoch's order: O(n log(bucket size)) time.
  DistributedLengthGroupedSampler(
      std::vector<int64_t> lengths, const DistributedLengthGroupedSamplerOptions& options);

  /// As `ShardedSampler::next`.
  ///
  /// \throws c10::ValueError  another batch size than the options'.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

 private:
  size_t batch_size_;
};

}  // namespace ddp
