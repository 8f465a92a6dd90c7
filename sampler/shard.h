#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp {

/// Everything that decides which samples one rank sees in one epoch.
struct ShardSpec {
  int64_t dataset_size = 0;
  int64_t num_replicas = 1;
  int64_t rank = 0;
  bool shuffle = true;
  int64_t seed = 0;
  int64_t epoch = 0;
  bool drop_last = false;
};

/// Counts the samples that each rank draws per epoch; the same on all ranks.
///
/// \return ceil(dataset_size / num_replicas), or the floor with `drop_last`.
int64_t shard_size(const ShardSpec& spec);

/// Lists the dataset indices of `spec.rank`, in the order in which it visits them.
///
/// The ranks deal one common order out like cards: rank r gets positions r, r + num_replicas, ...
/// Where the order does not divide evenly it starts over from its front (a rank then repeats early
/// samples), or, with `drop_last`, loses its tail.
///
/// \param spec  dataset_size >= 0, num_replicas >= 1, 0 <= rank < num_replicas; seed and epoch are
///        added, as in PyTorch, so (seed 0, epoch 1) gives the order of (seed 1, epoch 0).
/// \return shard_size(spec) indices, each < dataset_size.
///
/// Collective: no. Cost: O(dataset_size) time and, while it runs, 8 * dataset_size bytes for the
/// permutation; without shuffling, only the rank's own share.
/// Source: torch/utils/data/distributed.py 2.11, bit for bit.
std::vector<size_t> shard_indices(const ShardSpec& spec);

}  // namespace ddp
