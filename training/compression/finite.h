#pragma once

#include <initializer_list>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Whether all elements of all tensors are finite; undefined ones have none.
///
/// \return a bool without dimensions, on the tensors' device, so that the host does not wait for a
///         GPU.
///
/// Cost: reads every element once.
at::Tensor all_finite(std::initializer_list<at::Tensor> tensors);

}  // namespace ddp
