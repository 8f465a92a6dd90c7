#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Strides of the gradient of `parameter`: the parameter's where those are dense, else contiguous.
/// Autograd's gradient layout contract.
at::DimVector gradient_strides(const at::Tensor& parameter);

/// Another tensor on the storage of `memory`, from element `offset` of that storage on.
///
/// Not an autograd view: optimizers call `detach_()` on gradients in `zero_grad()`, which a view
/// refuses.
at::Tensor alias(
    const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace ddp
