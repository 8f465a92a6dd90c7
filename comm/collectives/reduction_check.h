// Which reductions of which dtypes a backend supports, and what is sent to it for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// The reduction that is passed to the backend.
struct WireReduction {
  c10d::ReduceOp op;
  at::ScalarType dtype;  // of the wires: reduced_as()
  int divisor = 1;       // divides the result afterwards
};

/// \throws c10::ValueError  if the operation has no meaning for the tensor's dtype, or the backend
///         does not support it.
WireReduction wire_reduction(
    const char* call, const c10d::ReduceOp& op, const at::Tensor& tensor,
    c10d::ProcessGroup& group);

}  // namespace ddp
