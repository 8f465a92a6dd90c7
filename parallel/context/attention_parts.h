// The beginning of both attentions over a sequence that is cut.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp::functional {

/// The positions of a sequence in the order of the ranks that have them: of 2 W pieces, rank r has
/// r and 2 W - 1 - r.
///
/// \param length  a multiple of 2 * ranks.
at::Tensor order_of_ranks(int64_t length, int ranks);

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

at::Tensor whole_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
    std::optional<double> scale);

}  // namespace ddp::functional
