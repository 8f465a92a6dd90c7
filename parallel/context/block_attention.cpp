#include "context/block_attention.h"

#include <ATen/ATen.h>

namespace ddp::functional {
namespace {

constexpr double kNoDropout = 0;

}  // namespace

BlockOutput attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockOptions& options) {
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, kNoDropout, options.is_causal, /*attn_mask=*/{}, options.scale);
  return {output, log_sum};
}

BlockGradients attend_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const BlockOutput& whole, const BlockOptions& options) {
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, q, k, v, whole.output, whole.log_sum, kNoDropout, options.is_causal,
      /*attn_mask=*/{}, options.scale);
  return {of_q, of_k, of_v};
}

}  // namespace ddp::functional
