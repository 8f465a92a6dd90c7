#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp::functional {

struct AttentionArguments {
  at::Tensor q, k, v;
};

/// Under autocast in its dtype, as scaled_dot_product_attention() takes them.
///
/// \throws c10::ValueError  unless q, k and v are [N, heads, T / W, d], of one shape, dtype and
///         device.
AttentionArguments attention_arguments(
    const char* call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const c10d::ProcessGroup& group);

/// Attention on one rank.
at::Tensor whole_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
    std::optional<double> scale);

}  // namespace ddp::functional
