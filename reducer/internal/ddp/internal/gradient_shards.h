#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/flat_parameters.h>

namespace ddp {

/// This rank's part of one bucket's averages, where each rank keeps only its own (ZeRO, stage 2). A
/// bucket's gradients lie as in a FlatLayout, each with the strides of its parameter.
struct GradientShard {
  at::Tensor average;              // 1-D
  std::vector<ShardPiece> pieces;  // of `average`
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

}  // namespace ddp
