#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backends/mpi/operations/exchange.h"

namespace ddp::backends::mpi {

/// A reduction: rank r combines all ranks' elements [begins[r], begins[r + 1]), its share.
///
/// Each element is combined in rank order, as over shared memory: the bits are the same in every
/// run, whatever the sizes are, and those of shm.
struct ReductionPlan {
  at::ScalarType dtype;
  c10d::ReduceOp op;
  /// This rank's elements.
  const std::byte* input;
  std::vector<size_t> begins;  // world size + 1
  /// Memory of this rank's share; may be its part of `input`. Null if the share is empty.
  std::byte* sums;
  /// Gets the shares of all ranks, where `input` lies; null: each rank keeps its own.
  std::byte* results;
  std::function<void()> finish;  // as ExchangePlan's
};

OperationPtr make_reduction(ReductionPlan plan, Tags tags);

}  // namespace ddp::backends::mpi
