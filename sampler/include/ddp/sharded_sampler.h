#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <ddp/detail/item_hash.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/data/samplers/distributed.h>

namespace ddp {

class ShardCursor;

/// The base class of this library's samplers. In each epoch all ranks draw the same new order of
/// the dataset, and each rank visits its share of that order.
///
/// Copies share one state: the data loader holds a copy, and `set_epoch` on yours reaches it. For
/// the same reason, give each data loader a sampler of its own.
///
/// **Resuming.** `save` writes the position of all ranks together in the epoch's order. `load`
/// continues from that position, on any number of ranks: no sample is lost or repeated, apart from
/// those that pad the end of every epoch. A data loader with worker threads, or a prefetching one,
/// draws ahead of the training loop. There, the loop calls `consume` for the samples that it has
/// used. Where `consume` was never called, in this run or in the one that was loaded, the position
/// counts the samples that `next` returned.
///
/// Thread safety: every call takes the state's lock, so that a thread may draw ahead while the
/// training loop consumes and saves.
class DDP_API ShardedSampler : public torch::data::samplers::DistributedSampler<> {
 public:
  /// Chooses the epoch whose order the next `reset` draws. The current epoch continues unchanged.
  /// `save` writes the chosen epoch from now on.
  ///
  /// Call it before each epoch, with the same number on every rank, or let the sampler advance by
  /// itself (option `advance_epoch`). A shuffling sampler that must begin a second epoch in the
  /// order of the one before warns, once. LibTorch's base class has a member of this name that is
  /// not virtual and does not reach copies: call this one.
  void set_epoch(size_t epoch);

  /// \return the number last given to `set_epoch`, read by `load`, or advanced to; 0 at first.
  size_t epoch() const;

  /// Starts an epoch: draws this rank's indices. Data loaders call it in `begin()`.
  ///
  /// \param new_size  a new size of the dataset, kept from here on.
  /// \throws c10::ValueError  another size than that of the weights or lengths the sampler was
  ///         given.
  ///
  /// Cost: drawing the order, 8 bytes for each of this rank's samples, and 8 for each sample of the
  ///   dataset while it draws (16 for groups of similar length).
  void reset(std::optional<size_t> new_size = std::nullopt) override;

  /// Takes the next indices of this rank's share; starts an epoch if no `reset` has.
  ///
  /// \param batch_size  the most to take, >= 1.
  /// \return 1 to batch_size indices, or nothing when the epoch is over.
  /// \throws c10::ValueError  batch_size is 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Takes this rank's part of the next `global` samples of the order: the same samples a step for
  /// any number of ranks. So a run goes on with the same steps after ranks were lost or have joined
  /// (rebind()), and ends an epoch without samples that pad it.
  ///
  /// The ranks' parts differ by at most one sample, so train with Reduction::SampleWeighted. The
  /// last step of an epoch has the samples that are left; with drop_last it is left out. Position p
  /// of the order belongs to rank p % num_replicas. Counts the samples as used: call it once a
  /// step.
  ///
  /// \param global  how many samples all ranks together take, >= 1; the same on every rank.
  /// \return 0 to ceil(global / num_replicas) indices: none where a step has fewer samples than
  ///         there are ranks, and a rank then takes part with an empty batch; nothing when the
  ///         epoch is over, on all ranks at once.
  /// \throws c10::ValueError  `global` is 0. c10::Error  in an epoch in which next() was called.
  ///
  /// Example:
  /// ```
  /// while (auto indices = sampler.next_of(256)) train(dataset.get_batch(*indices));
  /// ```
  std::optional<std::vector<size_t>> next_of(size_t global);

  /// Shares what is left of the epoch with the ranks of another group. The next `reset`, or `next`
  /// without one, goes on at the position; a data loader that iterates has to begin again.
  ///
  /// Call it between two steps, on every rank of the group. A rank that joins first loads what
  /// another rank saved.
  ///
  /// \throws c10::Error  on every rank, with the same text, where ranks are at different positions
  ///         or visit different orders; nothing has changed then.
  ///
  /// Collective: yes. Blocks: host.
  void rebind(const GroupArg& group = {});

  /// Returns a function that takes this sampler and its copies back to the present position: a step
  /// that failed draws the same samples again. A data loader that iterates has to begin again then.
  std::function<void()> bookmark() const;

  /// Whether this rank has used every sample of its share in the current epoch.
  bool is_over() const;

  /// Ends the current epoch early: `next` returns nothing more, so that a data loader that draws
  /// ahead comes to its end.
  void stop();

  /// Counts this rank's next `samples` samples as used by the training loop. From the first call on
  /// (also one with 0), `save` writes this count, and not that of the samples that `next` returned.
  ///
  /// \throws c10::ValueError  more than `next` returned in this epoch and `consume` has not counted
  ///         yet. c10::Error  in an epoch of next_of().
  ///
  /// Example:
  /// ```
  /// for (auto& batch : *loader) {  // with worker threads, which draw ahead
  ///   train(batch);
  ///   sampler.consume(batch.target.size(0));
  /// }
  /// ```
  void consume(size_t samples);

  /// \return how many samples this rank draws per epoch: `len()` in Python.
  size_t size() const;

  /// \return the position of the epoch's order at which the last `reset` began: 0, and above it
  ///         after `load` or `rebind` in the middle of an epoch.
  size_t offset() const;

  /// Writes the epoch, the position within it, and all that decides the epoch's order.
  ///
  /// Save between two steps, when every rank has consumed the same number of samples: rank 0's file
  /// then serves all ranks.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads what `save` wrote. The next `reset` continues at the position, unless `set_epoch`
  /// chooses another epoch in between. The number of ranks may differ from that of the saving run.
  ///
  /// \throws c10::ValueError  the archive was saved by a sampler that visits another order (dataset
  ///         size, seed, ...), or is not from `save`. The sampler is then unchanged.
  void load(torch::serialize::InputArchive& archive) override;

  /// Throws on every rank where the ranks' data sets, or the options of their samplers, differ.
  ///
  /// A data set that each process shuffled or split by random numbers of its own is a different one
  /// on every rank: the ranks' shares of the numbers 0, 1, 2, ... then overlap in the items that
  /// they stand for, and nothing else notices. Call it once, before training, with the data set as
  /// it is before transforms that draw random numbers.
  ///
  /// \param dataset  of LibTorch's kinds that load by index (`get_batch`), with items of tensors,
  ///        numbers or texts, in `torch::data::Example`, `std::vector`, `std::pair` or
  ///        `std::tuple`. Map structs of your own to these, by `torch::data::transforms::Lambda`.
  /// \param items  how many of the first items are compared, bit by bit; the data set's size is in
  ///        any case.
  /// \throws c10::Error  on every rank, with the same text, where something differs, or a rank
  ///         could not load an item.
  ///
  /// Example:
  /// ```
  /// sampler.check_dataset(dataset);
  /// ```
  ///
  /// Collective: yes. Blocks: host. Cost: loads these items, and exchanges some 100 bytes a rank.
  /// Source: Python has none.
  template <typename Dataset>
  void check_dataset(Dataset& dataset, size_t items = 16, const GroupArg& group = {}) const {
    const auto hash_first_items = [&](detail::ItemHash& hash) {
      const std::optional<size_t> size = dataset.size();
      std::vector<size_t> first(std::min(items, size.value_or(items)));
      std::iota(first.begin(), first.end(), size_t{0});
      hash.add(size.value_or(0));
      if (!first.empty()) hash.add(dataset.get_batch(first));
    };
    check_same_on_all_ranks(hash_first_items, items, group);
  }

 protected:
  /// \param cursor  decides which indices come, and in which order.
  explicit ShardedSampler(std::shared_ptr<ShardCursor> cursor);

 private:
  void check_same_on_all_ranks(
      const std::function<void(detail::ItemHash&)>& hash_first_items, size_t items,
      const GroupArg& group) const;

  std::shared_ptr<ShardCursor> cursor_;
};

}  // namespace ddp
