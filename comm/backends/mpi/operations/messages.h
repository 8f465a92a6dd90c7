#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "backends/mpi/operations/operation.h"

namespace ddp::backends::mpi {

/// A message to one rank. MPI compares nothing, so an envelope says what it holds, and with a short
/// message its elements. Those of a long one follow with a tag of their own, once the receiver has
/// compared: so they cannot arrive in memory of another size.
///
/// \param tensor  dense and contiguous.
OperationPtr make_send(const at::Tensor& tensor, int to, int tag);

/// \param from  unset: any rank.
OperationPtr make_receive(const at::Tensor& tensor, std::optional<int> from, int tag);

}  // namespace ddp::backends::mpi
