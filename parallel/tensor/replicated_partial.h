#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Sums the gradient of `parameter` over the group in each backward pass. Does nothing if it does
/// so already.
void sum_gradient_over(const at::Tensor& parameter, const ProcessGroup& group);

}  // namespace ddp
