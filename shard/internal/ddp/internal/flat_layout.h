#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp {

/// Elements of one tensor, in the order of its memory, that are part of one rank's shard.
struct ShardPiece {
  size_t slot;    // index of the tensor in its layout
  int64_t from;   // first element in the tensor
  int64_t at;     // first element in the shard
  int64_t numel;  // at least 1
};

/// Tensors one after another in a flat one, which is cut into a shard for each rank: with shards of
/// n elements, rank r has elements [r * n, (r + 1) * n). Elements after the last tensor are
/// padding.
struct FlatLayout {
  /// \param numels  the tensors' numbers of elements.
  FlatLayout(const std::vector<int64_t>& numels, int ranks);

  /// Elements of the flat tensor, with padding.
  int64_t numel() const { return shard_numel * ranks; }
  int64_t padding() const { return numel() - offsets.back(); }
  /// The pieces of a rank's shard, in its order.
  std::vector<ShardPiece> pieces(int rank) const;

  std::vector<int64_t> offsets;  // by tensor: its first element; and the end of the last tensor
  int ranks;
  int64_t shard_numel;  // a multiple of 4
};

}  // namespace ddp
