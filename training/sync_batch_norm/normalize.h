#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Half precision is summed and normalized in float32.
at::ScalarType compute_dtype_of(const at::Tensor& input);

/// \param counts  of values a channel, of all ranks.
/// \throws c10::ValueError  on every rank, if a channel has less than two values in all.
void check_has_values(const at::Tensor& input, const at::Tensor& counts);

/// \throws c10::Error  in a backward pass with create_graph.
void check_has_no_graph();

/// Sums what belongs to gradients over the ranks, by the weights of their losses.
void sum_weighted(at::Tensor& sums, const ProcessGroup& group);

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
BatchStatistics gather_statistics(const at::Tensor& input, const ProcessGroup& group);

/// Normalizes `input` with these statistics; autograd reaches input, weight and bias.
at::Tensor normalize_with(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const BatchStatistics& statistics, double eps, const ProcessGroup& group);

}  // namespace ddp
