// The order of an epoch, and the share of it that one rank gets: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The order in which all ranks together visit a dataset; every rank draws the same.
struct Order {
  /// Samples in the dataset, and positions in an epoch.
  int64_t dataset_size = 0;
  int64_t size = 0;
  /// Whether the order differs from one epoch to the next.
  bool shuffled = true;
  /// Whether dataset_size and size are equal and may change; false where the order comes from
  /// weights or lengths.
  bool resizable = false;
  /// Whether `draw` uses its step_size.
  bool depends_on_step_size = false;
  /// A hash of everything else that decides the order, such as the weights.
  int64_t fingerprint = 0;
  /// Draws the order: [size] int64, or an undefined tensor for 0, 1, 2, ...
  ///
  /// `seed` is the user's plus the epoch. `step_size` is the number of samples that all ranks
  /// together take in a step; only an order that groups samples by step uses it.
  std::function<at::Tensor(int64_t size, uint64_t seed, int64_t step_size)> draw;
};

/// All samples once: shuffled, or 0, 1, 2, ...
Order permuted_order(int64_t dataset_size, bool shuffle);

/// `num_samples` samples drawn by `weights` ([n] double).
Order weighted_order(const at::Tensor& weights, int64_t num_samples, bool replacement);

/// All samples once, in steps of similar lengths: see DistributedLengthGroupedSampler.
Order length_grouped_order(std::vector<int64_t> lengths, int64_t steps_per_bucket, bool shuffle);

/// How an order ends that does not divide evenly by the ranks.
enum class Tail {
  kRepeat,  // the order repeats from its front, until all ranks have equally many
  kDrop,    // samples that would not fill a batch on every rank are left out
  kUneven,  // the first ranks get one sample more
};

/// The input that decides which positions of an epoch's order one rank gets.
struct ShardSpec {
  int64_t order_size = 0;
  /// Positions from the front that were visited before this shard begins, by any number of ranks.
  int64_t offset = 0;
  int64_t num_replicas = 1;
  int64_t rank = 0;
  Tail tail = Tail::kRepeat;
  /// For kDrop: how many samples make a batch of one rank.
  int64_t batch_size = 1;
};

/// Counts the samples that `spec.rank` draws.
int64_t sample_count(const ShardSpec& spec);

/// Lists the samples of `spec.rank`, in the order in which it visits them.
///
/// The ranks deal the rest of one common order out like cards: rank r gets positions
/// offset + r, offset + r + num_replicas, ...
///
/// \param order  [order_size] int64, a sample at each position; undefined stands for 0, 1, 2, ...
/// \param spec   order_size >= 0, num_replicas >= 1, 0 <= rank < num_replicas, offset >= 0.
/// \return sample_count(spec) samples.
///
/// Collective: no. Cost: 8 bytes a sample of the shard.
/// Source: torch/utils/data/distributed.py 2.11, bit for bit, where offset is 0.
std::vector<size_t> take_shard(const at::Tensor& order, const ShardSpec& spec);

}  // namespace ddp
