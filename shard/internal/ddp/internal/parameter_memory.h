// The memory of parameters and of tensors that lie as they do: gradients, and the optimizer's
// state.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Strides of the gradient of `parameter`: the parameter's where those are dense, else contiguous.
/// Autograd's gradient layout contract.
at::DimVector gradient_strides(const at::Tensor& parameter);

/// All elements of `tensor` in the memory order of `parameter`, which has the same shape: 1-D,
/// sharing the tensor's memory where its strides equal the parameter's.
at::Tensor memory_order_of(const at::Tensor& tensor, const at::Tensor& parameter);

/// Another tensor on the storage of `memory`, from element `offset` of that storage on.
///
/// Not an autograd view: optimizers call `detach_()` on gradients in `zero_grad()`, which a view
/// refuses.
at::Tensor alias(
    const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

/// 1-D memory: the backend's own where it can reduce that in place, without copies in and out.
at::Tensor reducible_memory(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

/// Frees the memory of a tensor's storage. Views share the storage and not its address, so that
/// they have the next memory, too. Until then nothing may read them.
void release_memory(const at::Tensor& tensor);

/// Gives the storage of a released tensor other memory.
///
/// \param bytes  at least what the tensor needs.
void refill_memory(const at::Tensor& tensor, c10::DataPtr memory, size_t bytes);
/// The same with the memory of `fresh`, which loses it.
void refill_memory(const at::Tensor& tensor, const at::Tensor& fresh);

}  // namespace ddp
