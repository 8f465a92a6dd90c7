#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

// Linear layers with an exchange of their input. A backward pass starts the reduction of the
// input's gradient, computes the gradients of weight and bias, and only then waits. With
// create_graph it waits at once.

/// linear(copy_to_region(input), weight, bias). Under autocast, which reduces in the dtype of the
/// input and not of the layer, that itself: the reduction follows all gradients of the layer.
at::Tensor copied_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group);

/// linear(gathered, weight, bias), where `gathered` is `input` of all ranks along dimension 0.
/// Keeps `input` for the backward pass and gathers it again there, beside the input's gradient.
at::Tensor gathered_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group);

}  // namespace ddp
