#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "work/collective_handle.h"

namespace ddp {

/// An all-to-all of lists over a backend that only has the one of a flat tensor, such as Gloo.
///
/// \param outputs, inputs  of one dtype, one tensor for each rank.
/// \param start  starts the all-to-all of flat tensors, with the number of elements for each rank.
StartedCall exchange_flat(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    c10::function_ref<WorkPtr(
        at::Tensor& to, at::Tensor& from, std::vector<int64_t>& received,
        std::vector<int64_t>& sent)>
        start);

}  // namespace ddp
