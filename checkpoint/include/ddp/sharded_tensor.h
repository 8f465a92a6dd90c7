#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A box of a tensor that is cut over the ranks: what one rank has of it.
struct ShardedTensor {
  /// The tensor's name, of which all ranks mean the same tensor: "blocks.3.fc.weight".
  std::string name;
  /// The shape of the whole tensor, the same on every rank.
  std::vector<int64_t> sizes;
  /// Where `local` begins in it, by dimension: `offset[d] + local.size(d) <= sizes[d]`.
  std::vector<int64_t> offset;
  /// This rank's elements, with as many dimensions; empty ones are allowed. A load writes into
  /// it: return the tensor itself or a view of it, and not a copy.
  at::Tensor local;
  /// A save writes the boxes with 0, which must not overlap. Further copies of the same elements
  /// have other numbers: the coordinate in the axis over which they are replicated.
  int64_t replica = 0;
  /// Of a pipeline: the stage that the tensor belongs to. A name that several stages have is an
  /// error.
  std::optional<int64_t> stage = {};
};

/// Returns what this rank has of a part: several boxes of a name, one or none.
using ShardsCallback = std::function<std::vector<ShardedTensor>()>;

}  // namespace ddp
