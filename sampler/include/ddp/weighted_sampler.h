#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/export.h>
#include <ddp/sharded_sampler.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `DistributedWeightedSampler`; every rank must pass the same, but for `rank`.
struct DistributedWeightedSamplerOptions {
  /// Number of ranks that share the draws, >= 1. Default: the size of the default group
  TORCH_ARG(std::optional<int64_t>, num_replicas) = {};
  /// This process's number among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
  /// Draws per epoch, over all ranks together, >= 1. Default: as many as there are weights
  TORCH_ARG(std::optional<int64_t>, num_samples) = {};
  /// Whether a sample may be drawn again within an epoch. Default: true
  TORCH_ARG(bool, replacement) = true;
  /// Seed of the draws. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// As DistributedSamplerOptions::drop_last. Default: false
  TORCH_ARG(bool, drop_last) = false;
  /// As DistributedSamplerOptions::advance_epoch. Default: false
  TORCH_ARG(bool, advance_epoch) = false;
};

/// Draws samples with given probabilities, for datasets whose classes are out of balance, and
/// distributes the draws over the ranks.
///
/// The ranks together draw the samples that Python's torch.utils.data.WeightedRandomSampler draws
/// for the same weights and a generator seeded with seed + epoch. Rank r gets draws r, r +
/// num_replicas, ...
///
/// Example:
/// ```
/// std::vector<double> weights;  // one a sample
/// for (const int64_t label : labels) weights.push_back(1.0 / count_of[label]);
/// ddp::DistributedWeightedSampler sampler(std::move(weights));
/// ```
///
/// Source: torch/utils/data/sampler.py 2.11, WeightedRandomSampler.
class DDP_API DistributedWeightedSampler : public ShardedSampler {
 public:
  /// \param weights  one for each sample of the dataset, >= 0 and finite, at most 2^24 of them;
  ///        their sum need not be 1.
  /// \throws c10::ValueError  weights other than these, num_samples < 1, or, without replacement,
  ///         more draws than weights above 0; and as `DistributedSampler`'s.
  ///
  /// Collective: no.
  explicit DistributedWeightedSampler(
      const std::vector<double>& weights, const DistributedWeightedSamplerOptions& options = {});
};

}  // namespace ddp
