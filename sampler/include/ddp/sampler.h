#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/arg.h>
#include <torch/data/samplers/distributed.h>

namespace ddp {

struct ShardSpec;

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
  /// This process among them, in [0, num_replicas). Default: the rank in the default group
  TORCH_ARG(std::optional<int64_t>, rank) = {};
  /// Draw a new order in each epoch (see `set_epoch`) instead of 0, 1, 2, ... Default: true
  TORCH_ARG(bool, shuffle) = true;
  /// Seed of the shuffled orders. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// Drop the tail of the order where the dataset does not divide evenly by the ranks, instead of
  /// repeating its first samples. Default: false
  TORCH_ARG(bool, drop_last) = false;
};

/// Gives each rank its share of a dataset, a new one in each epoch.
///
/// The indices, and their order, are those of Python's torch.utils.data.DistributedSampler for the
/// same options. All ranks draw equally many (see `size`), so they take equally many steps.
///
/// Copies share one state: the data loader holds a copy, and `set_epoch` on yours reaches it. For
/// the same reason, give each data loader a sampler of its own.
///
/// Thread safety: none. A data loader draws indices on the thread that iterates over it, with
/// worker threads too, so calls between epochs from that thread are safe.
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
/// and `save`/`load` resume in the middle of an epoch.
class DistributedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  /// Checks the options; draws nothing yet.
  ///
  /// \param dataset_size  number of samples in the whole dataset; 0 gives empty epochs.
  /// \throws c10::ValueError  num_replicas < 1, or a rank outside [0, num_replicas).
  /// \throws c10::Error  num_replicas or rank unset while there is no default group.
  ///
  /// Collective: no.
  explicit DistributedSampler(size_t dataset_size, const DistributedSamplerOptions& options = {});

  /// Chooses the epoch whose order the next `reset` draws; the current one goes on undisturbed.
  ///
  /// Call it before each epoch, with the same number on every rank. Otherwise each epoch repeats
  /// the same order. LibTorch's base class has a member of this name that is not virtual and does
  /// not reach copies: call this one on a `ddp::DistributedSampler`.
  void set_epoch(size_t epoch);

  /// \return the number last given to `set_epoch` or read by `load`; 0 at first.
  size_t epoch() const;

  /// Starts an epoch: draws this rank's indices. Data loaders call it in `begin()`.
  ///
  /// \param new_size  a new size of the dataset, kept from here on.
  ///
  /// Cost: O(dataset size) time; 8 bytes for each of this rank's samples, and 8 for each sample of
  /// the dataset while it draws.
  void reset(std::optional<size_t> new_size = std::nullopt) override;

  /// Takes the next indices of this rank's share; starts an epoch if no `reset` has.
  ///
  /// \param batch_size  the most to take, >= 1.
  /// \return 1 to batch_size indices, or nothing when the epoch is over.
  /// \throws c10::ValueError  batch_size is 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// \return how many samples this rank draws per epoch: `len()` in Python. The same on all ranks.
  size_t size() const;

  /// Writes the epoch, the position within it, and the options that give the position its meaning.
  ///
  /// The position counts samples that `next` handed out. Every rank's file holds the same, so one
  /// serves all. A data loader with worker threads draws ahead of the loop that it feeds.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads what `save` wrote. The next `reset` goes on behind the last sample that was handed out,
  /// unless `set_epoch` chooses another epoch in between.
  ///
  /// \throws c10::ValueError  the archive was saved by a sampler with another dataset size or other
  ///         options (rank apart), or is not from `save`. The sampler is then unchanged.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;

  explicit DistributedSampler(const ShardSpec& spec);

  std::shared_ptr<State> state_;
};

}  // namespace ddp
