#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Of each channel over the batches of all ranks; double, on the input's device.
struct BatchStatistics {
  at::Tensor mean;   // [C]
  at::Tensor var;    // [C], over count
  at::Tensor count;  // scalar: values a channel
};

/// Collective: one all-gather of 2 C + 1 doubles.
///
/// \throws c10::ValueError  on every rank, for less than two values a channel in all.
BatchStatistics gather_statistics(const at::Tensor& input, const ProcessGroup& group);

/// `input` normalized with these statistics; autograd goes through input, weight and bias.
at::Tensor normalize_with(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const BatchStatistics& statistics, double eps, const ProcessGroup& group);

}  // namespace ddp
