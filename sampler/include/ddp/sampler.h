#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ddp/export.h>
#include <ddp/sharded_sampler.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `DistributedSampler`; every rank must pass the same, but for `rank`.
///
/// Example:
/// ```
/// ddp::DistributedSampler sampler(
///     size, ddp::DistributedSamplerOptions().seed(42).drop_last(true));
/// ```
struct DistributedSamplerOptions {
  /// Number of ranks that share the dataset, >= 1. Default: the size of the default group
  TORCH_ARG(std::optional<int64_t>, num_replicas) = {};
  /// This process's number among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
  /// Draw a new order in each epoch (see `set_epoch`) instead of 0, 1, 2, ... Default: true
  TORCH_ARG(bool, shuffle) = true;
  /// Seed of the shuffled orders. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// Drop the tail of the order where the dataset does not divide evenly by the ranks, instead of
  /// repeating its first samples. Default: false
  TORCH_ARG(bool, drop_last) = false;
  /// Advance to the next epoch where `set_epoch` was not called since the last one. Python's
  /// sampler has no such option. Default: false
  TORCH_ARG(bool, advance_epoch) = false;
};

/// Gives each rank its share of a dataset, a new one in each epoch.
///
/// The indices, and their order, are those of Python's torch.utils.data.DistributedSampler for the
/// same options. All ranks draw equally many (see `size`), so they take equally many steps.
///
/// Example:
/// ```
/// ddp::DistributedSampler sampler(*dataset.size());
/// auto loader = torch::data::make_data_loader(dataset, sampler, /*options=*/32);
/// for (size_t epoch = 0; epoch < 10; ++epoch) {
///   sampler.set_epoch(epoch);
///   for (auto& batch : *loader) { ... }
/// }
/// ```
///
/// Source: torch/utils/data/distributed.py 2.11. Deliberate differences: `num_replicas` is checked,
/// a forgotten `set_epoch` is noticed, and `save`/`load` resume in the middle of an epoch, on
/// another number of ranks too.
class DDP_API DistributedSampler : public ShardedSampler {
 public:
  /// Checks the options; draws nothing yet.
  ///
  /// \param dataset_size  number of samples in the whole dataset; 0 gives empty epochs.
  /// \throws c10::ValueError  num_replicas < 1, or a rank outside [0, num_replicas).
  /// \throws c10::Error  num_replicas or rank unset while there is no default group.
  ///
  /// Collective: no.
  explicit DistributedSampler(size_t dataset_size, const DistributedSamplerOptions& options = {});
};

/// Options for `DistributedEvalSampler`; every rank must pass the same, but for `rank`.
struct DistributedEvalSamplerOptions {
  /// Number of ranks that share the dataset, >= 1. Default: the size of the default group
  TORCH_ARG(std::optional<int64_t>, num_replicas) = {};
  /// This process's number among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
  /// Draw a new order in each epoch (see `set_epoch`) instead of 0, 1, 2, ... Default: false
  TORCH_ARG(bool, shuffle) = false;
  /// Seed of the shuffled orders. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// As DistributedSamplerOptions::advance_epoch. Default: false
  TORCH_ARG(bool, advance_epoch) = false;
};

/// Gives each sample to exactly one rank: nothing is repeated and nothing dropped, so that metrics
/// that are summed over the ranks are exact.
///
/// The first `dataset_size % num_replicas` ranks draw one sample more than the others, and ranks
/// beyond the dataset's size none at all. So ranks may take different numbers of steps. A forward
/// pass under NoGradGuard, or in `eval()` without a backward pass, never communicates, so that an
/// evaluation loop needs no `join`. Sum over samples, as below, and not over batches.
///
/// Example:
/// ```
/// ddp::DistributedEvalSampler sampler(*test_set.size());
/// auto loader = torch::data::make_data_loader(test_set, sampler, /*options=*/256);
/// for (auto& batch : *loader) correct += count_correct(model->module()->forward(batch.data), ...);
/// ddp::all_reduce(correct);  // over exactly *test_set.size() samples
/// ```
///
/// Source: Python has none; without padding and `drop_last`, its indices are those of
/// torch.utils.data.DistributedSampler.
class DDP_API DistributedEvalSampler : public ShardedSampler {
 public:
  /// As `DistributedSampler`'s.
  explicit DistributedEvalSampler(
      size_t dataset_size, const DistributedEvalSamplerOptions& options = {});

  /// Takes the options of a `DistributedSampler`, whose default is to shuffle.
  ///
  /// \throws c10::ValueError  also for drop_last, as no sample is dropped here.
  DistributedEvalSampler(size_t dataset_size, const DistributedSamplerOptions& options);
};

}  // namespace ddp
