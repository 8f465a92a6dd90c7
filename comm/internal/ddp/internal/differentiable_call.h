#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Records that this rank calls a function whose backward pass is a collective of `group` if
/// `tensor` requires a gradient. Ranks of which some do not require it are found by their calls
/// once one of them waits for another.
///
/// \param has_equal_sizes  whether `tensor` has as many elements on all ranks.
void record_differentiable_call(
    const ProcessGroup& group, const at::Tensor& tensor, bool requires_gradient,
    bool has_equal_sizes = true);

}  // namespace ddp
