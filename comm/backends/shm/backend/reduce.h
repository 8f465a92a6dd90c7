#pragma once

#include <cstddef>
#include <vector>

#include <c10/core/ScalarType.h>
#include <ddp/internal/capabilities.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddp::backends::shm {

/// The reductions that `reduce_elements` supports. Gloo, which carries those between hosts,
/// supports the same except AVG.
const ReductionTable& reductions();
bool can_reduce(at::ScalarType type, const c10d::ReduceOp& op);

/// Combines elements [begin, end) of all `sources`, in their order, and writes the result to the
/// same place in all `destinations`, which may be sources too.
///
/// Element by element, so that the result does not depend on how a tensor is cut. Half precisions
/// are summed as float and rounded once.
///
/// \param op  one that can_reduce.
/// \param share  the factor of each source for AVG; 0: one over their number.
void reduce_elements(
    at::ScalarType type, const c10d::ReduceOp& op, const std::vector<const std::byte*>& sources,
    const std::vector<std::byte*>& destinations, size_t begin, size_t end, double share = 0);

}  // namespace ddp::backends::shm
