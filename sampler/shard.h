#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

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
