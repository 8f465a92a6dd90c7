// The layout of shards: the elements of parameters that belong to each rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Elements of one parameter, in the order of its memory, that are part of one rank's slice.
struct ShardPiece {
  size_t slot;    // index of the parameter in its chunk
  int64_t from;   // first element in the parameter
  int64_t at;     // first element in the slice
  int64_t numel;  // at least 1
};

/// Lays the parameters' elements one after another, and cuts them into one slice of `size` elements
/// for each rank.
///
/// \param numels  the parameters' numbers of elements.
/// \return  the pieces of slice `rank`.
std::vector<ShardPiece> pieces_of(const std::vector<int64_t>& numels, int64_t size, int rank);

/// Groups parameters of one dtype and device in reverse order, the usual order of their gradients.
/// Each group has at least `bytes`, except the last one of a dtype and device.
std::vector<std::vector<at::Tensor>> chunks_of(
    const std::vector<at::Tensor>& parameters, int64_t bytes);

/// All elements of `tensor` in the memory order of `parameter`, which has the same shape: 1-D,
/// sharing the tensor's memory where its strides equal the parameter's.
at::Tensor memory_order_of(const at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace ddp
