#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Statistics of each channel over the batches of all ranks; double, on the input's device.
struct BatchStatistics {
  at::Tensor mean;   // [C]
  at::Tensor var;    // [C], over count
  at::Tensor count;  // scalar: values a channel
};

/// Computes the statistics of the batches of all ranks. Collective: one all-gather of 2 C + 1
/// doubles.
///
/// \throws c10::ValueError  on every rank, if a channel has less than two values in all.
BatchStatistics gather_statistics(const at::Tensor& input, double eps, const ProcessGroup& group);

/// Normalizes `input` with these statistics; autograd reaches input, weight and bias.
at::Tensor normalize_with(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const BatchStatistics& statistics, double eps, const ProcessGroup& group);

}  // namespace ddp
