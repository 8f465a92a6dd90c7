#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// linear(gathered, weight, bias), where `gathered` is `input` of all ranks along dimension 0.
/// Keeps `input` for the backward pass and gathers it again there.
at::Tensor gathered_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group);

}  // namespace ddp
