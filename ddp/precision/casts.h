#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace ddp {

/// Casts floating tensors, as `to(dtype)` does one: on a GPU by few kernels for all of them, each
/// with a node of its own in autograd's graph.
std::vector<at::Tensor> cast_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype);

}  // namespace ddp
