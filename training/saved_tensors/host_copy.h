// Copies of saved tensors in other memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "saved_tensors/saved_tensor_hooks.h"

namespace ddp {

/// Whether a copy could take the tensor's place: it is dense, and no parameter or other leaf that
/// requires a gradient, whose memory is in use anyway.
bool can_be_replaced(const at::Tensor& tensor);

/// Copies a dense tensor to the host, and back to its device when it is unpacked.
///
/// From an accelerator: to pinned memory, on the current stream, without waiting. Whatever stream
/// unpacks waits for that copy.
UnpackFunction copy_to_host(const at::Tensor& tensor);

}  // namespace ddp
