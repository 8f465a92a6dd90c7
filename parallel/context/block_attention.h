// Attention of some queries to some keys, whose results are merged to attention to all keys.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::functional {

/// How a block of queries attends to a block of keys.
struct BlockOptions {
  bool is_causal = false;  // as many queries as keys; each attends to those up to its own index
  double scale = 1;        // of the scores
};

/// The output as if there were no other keys, and the logarithm of the sum of the exponentials of
/// the scores, by which outputs of several blocks are weighted.
struct BlockOutput {
  at::Tensor output;   // [N, heads, queries, d]
  at::Tensor log_sum;  // [N, heads, queries], float32 or float64
};

/// \param q, k, v  [N, heads, queries or keys, d], on a CPU; the last dimension is contiguous.
BlockOutput attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockOptions& options);

struct BlockGradients {
  at::Tensor q, k, v;
};

/// The part of the gradients that is due to a block of keys.
///
/// \param gradient, whole  of the output, and the output, to all keys.
BlockGradients attend_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const BlockOutput& whole, const BlockOptions& options);

}  // namespace ddp::functional
