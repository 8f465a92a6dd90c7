// Tensors for the tests of collectives.
#pragma once

#include <ATen/ATen.h>

namespace ddp::testing {

inline at::Tensor filled(double value, at::ScalarType dtype = at::kFloat) {
  return at::full({2, 3}, value, dtype);
}

/// The same values, column by column in memory.
inline at::Tensor strided(const at::Tensor& tensor) { return tensor.t().contiguous().t(); }

}  // namespace ddp::testing
