#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Finds the `count` elements of the largest magnitude, in no order; NaN counts as the largest.
/// Among equal ones, the choice is the same in each call.
///
/// \param values  1-D, of at least `count` elements.
/// \return [count] int64.
///
/// Cost: on CPUs three passes over the elements, where few are wanted; at::topk keeps a heap.
at::Tensor largest_magnitudes(const at::Tensor& values, int64_t count);

}  // namespace ddp
