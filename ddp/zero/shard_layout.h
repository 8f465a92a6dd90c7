// Which elements of which parameters are a rank's part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Elements of one parameter, in the order of its memory, that are part of one rank's slice.
struct ShardPiece {
  size_t slot;    // of the parameter in its chunk
  int64_t from;   // element of the parameter
  int64_t at;     // element of the slice
  int64_t numel;  // at least 1
};

/// The parameters' elements one after another, cut into as many slices of `size` as there are
/// ranks.
///
/// \param numels  of the parameters.
/// \return  the pieces of slice `rank`.
std::vector<ShardPiece> pieces_of(const std::vector<int64_t>& numels, int64_t size, int rank);

/// Groups parameters of one dtype and device, in reverse order, as gradients come: each group but
/// the last ones reaches `bytes`.
std::vector<std::vector<at::Tensor>> chunks_of(
    const std::vector<at::Tensor>& parameters, int64_t bytes);

/// All elements of `tensor` in the order of the memory of `parameter`, which has its shape: 1-D, on
/// the same memory where its strides are the parameter's.
at::Tensor memory_order_of(const at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace ddp
