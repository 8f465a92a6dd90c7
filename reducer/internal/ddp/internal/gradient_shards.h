#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// This rank's part of one bucket's averages, where each rank keeps only its own (ZeRO, stage 2).
///
/// A bucket's gradients lie one after another, each with the strides of its parameter, and rank r's
/// part is elements [r * n, (r + 1) * n), where n is shard_size().
struct GradientShard {
  at::Tensor average;  // 1-D, of n elements; those after the bucket's end are padding
  // By parameter of the bucket: `average` holds a gradient of it, to which the next pass adds, as
  // to `.grad`. The optimizer that uses the gradients sets it to 0.
  std::vector<char> arrived;
  at::Tensor previous = {};  // the averages before this pass, while it is being reduced
};

/// By bucket. Final when the backward pass returns.
using GradientShards = std::vector<GradientShard>;

/// Marks all averages as used or dropped: the next pass overwrites them.
inline void release(GradientShards& shards) {
  for (auto& shard : shards) shard.arrived.assign(shard.arrived.size(), 0);
}

/// The size of a rank's part of `numel` elements, rounded up to a multiple of 4.
inline int64_t shard_size(int64_t numel, int64_t ranks) {
  constexpr int64_t kMultiple = 4;
  return ((numel + ranks - 1) / ranks + kMultiple - 1) / kMultiple * kMultiple;
}

}  // namespace ddp
