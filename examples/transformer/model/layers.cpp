#include "layers.h"

#include <limits>
#include <tuple>

#include <ATen/ATen.h>
#include <ddp/context_parallel.h>
#include <ddp/parallel_attention.h>
#include <ddp/parallel_linear.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include "cut_attention.h"

namespace transformer {
namespace {

namespace nn = torch::nn;

/// -inf above the diagonal: a position does not attend to later characters.
at::Tensor causal_mask(int64_t size, const at::TensorOptions& options) {
  return at::full({size, size}, -std::numeric_limits<double>::infinity(), options).triu(1);
}

/// Attends over positions that are cut, and drops no weights.
///
/// \param projected  [T, N, 3 * width]: queries, keys and values of heads of so many features.
at::Tensor attend_in_ring(const at::Tensor& projected, int64_t head, const ddp::ProcessGroup& cp) {
  const auto heads = projected
                         .unflatten(-1, {3, -1, head})  // [T, N, 3, heads, head]
                         .permute({2, 1, 3, 0, 4});     // [3, N, heads, T, head]
  const auto seen =
      ddp::functional::ring_attention(heads[0], heads[1], heads[2], cp, /*is_causal=*/true);
  return seen.permute({2, 0, 1, 3}).flatten(2);  // [T, N, width]
}

Layer make_whole_attention(const Shape& shape, const Groups& groups) {
  const nn::MultiheadAttention whole(
      nn::MultiheadAttentionOptions(shape.width, shape.heads).dropout(shape.dropout));
  const auto attention = whole.ptr();
  if (groups.cp_size() > 1) {
    const int64_t head = shape.width / shape.heads;
    return {attention, [attention, head, cp = groups.cp](const at::Tensor& x) {
              const auto projected =
                  at::linear(x, attention->in_proj_weight, attention->in_proj_bias);
              return attention->out_proj(attend_in_ring(projected, head, cp));
            }};
  }
  return {attention, [attention](const at::Tensor& x) {
            const auto mask = causal_mask(x.size(0), attention->in_proj_weight.options());
            return std::get<0>(
                attention->forward(x, x, x, /*key_padding_mask=*/{}, /*need_weights=*/false, mask));
          }};
}

}  // namespace

Layer make_attention(const Shape& shape, const Groups& groups) {
  if (groups.tp_size() == 1) return make_whole_attention(shape, groups);
  const CutAttention cut(ddp::ParallelMultiheadAttentionOptions(shape.width, shape.heads)
                             .dropout(shape.dropout)
                             .is_causal(true)
                             .process_group(groups.tp));
  const auto attention = cut->attention.ptr();
  if (groups.cp_size() == 1) {
    return {cut.ptr(), [attention](const at::Tensor& x) { return attention->forward(x); }};
  }
  const int64_t head = shape.width / shape.heads;
  return {cut.ptr(), [attention, head, cp = groups.cp](const at::Tensor& x) {
            const auto projected = attention->in_proj->forward(x);
            return attention->out_proj->forward(attend_in_ring(projected, head, cp));
          }};
}

Layer make_up(const Shape& shape, const Groups& groups) {
  if (groups.tp_size() == 1) return layer_of(nn::Linear(shape.width, 4 * shape.width));
  return layer_of(ddp::ColumnParallelLinear(
      ddp::ColumnParallelLinearOptions(shape.width, 4 * shape.width).process_group(groups.tp)));
}

Layer make_down(const Shape& shape, const Groups& groups) {
  if (groups.tp_size() == 1) return layer_of(nn::Linear(4 * shape.width, shape.width));
  return layer_of(ddp::RowParallelLinear(
      ddp::RowParallelLinearOptions(4 * shape.width, shape.width).process_group(groups.tp)));
}

}  // namespace transformer
