// Batch normalization over all ranks by LibTorch's fused operators, as Python's layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Whether LibTorch has the five operators for the input's device, dtype and layout, as for CUDA.
bool has_fused_operators(const at::Tensor& input);

/// A layer's tensors; undefined where it has none.
struct NormTensors {
  at::Tensor weight, bias, running_mean, running_var;
};

/// Normalizes `input` with the statistics of all ranks' batches, with which the running ones are
/// updated; autograd reaches input, weight and bias.
///
/// \throws c10::ValueError  on every rank, if a channel has less than two values in all.
///
/// Collective: one all-gather of 2 C + 1 numbers, float or double, and in backward an all-reduce of
/// 2 C.
at::Tensor normalize_fused(
    const at::Tensor& input, const NormTensors& layer, double momentum, double eps,
    const ProcessGroup& group);

}  // namespace ddp
