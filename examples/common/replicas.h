#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace examples {

/// Lists the ranks whose `tensors` are not, bit for bit, those of rank 0.
///
/// \param tensors  as many, of the same shapes and dtypes, on every rank; dense.
/// \return ranks in rising order, the same list on all; empty when all are equal.
///
/// Collective: yes. Cost: broadcasts all bytes once.
std::vector<int64_t> ranks_unlike_first(
    const std::vector<at::Tensor>& tensors, const ddp::GroupArg& group = {});

}  // namespace examples
