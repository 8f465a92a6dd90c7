#pragma once

#include <ATen/core/Tensor.h>

#include "backends/mpi/operations/exchange.h"

namespace ddp::backends::mpi {

/// Sums sparse tensors, in rank order, in place: each rank sends its own to all.
///
/// \param tensor  in coordinates (kSparse), with as many sparse dimensions on every rank.
OperationPtr make_sparse_reduction(const at::Tensor& tensor, Tags tags);

}  // namespace ddp::backends::mpi
