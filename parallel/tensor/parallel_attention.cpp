#include <ddp/parallel_attention.h>

#include <memory>
#include <optional>
#include <type_traits>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/tensor_parallel_rng.h>

#include "tensor/cut.h"

namespace ddp {

constexpr const char* kAttention = "ParallelMultiheadAttention";

ParallelMultiheadAttentionImpl::ParallelMultiheadAttentionImpl(
    const ParallelMultiheadAttentionOptions& given)
    : options(given) {
  reset();
}

ParallelMultiheadAttentionImpl::ParallelMultiheadAttentionImpl(
    const ParallelMultiheadAttentionOptions& given, const torch::nn::MultiheadAttention& whole)
    : options(given) {
  check_options();
  cut(whole);
}

void ParallelMultiheadAttentionImpl::check_options() {
  options.process_group(options.process_group().get());
  const auto& group = *options.process_group().get();
  check_divides(kAttention, "num_heads", options.num_heads(), group.getSize(), "ranks", group);
  check_divides(
      kAttention, "embed_dim", options.embed_dim(), options.num_heads(), "num_heads", group);
  DDP_CHECK_VALUE(
      options.dropout() >= 0 && options.dropout() < 1, kAttention,
      ": expected a dropout of at least 0 and below 1, got ", options.dropout(), " ",
      on_rank_text(group), ". Give the part of the attention weights that is dropped.");
}

void ParallelMultiheadAttentionImpl::cut(const torch::nn::MultiheadAttention& whole) {
  const auto group = options.process_group().get();
  const int64_t width = options.embed_dim();
  const auto& given = whole->options;
  DDP_CHECK_VALUE(
      given.embed_dim() == width && given.num_heads() == options.num_heads() &&
          given.kdim() == width && given.vdim() == width && !given.add_bias_kv() &&
          !given.add_zero_attn(),
      kAttention, ": expected a whole one of embed_dim ", width, " and num_heads ",
      options.num_heads(), ", without kdim, vdim, add_bias_kv and add_zero_attn, got embed_dim ",
      given.embed_dim(), " and num_heads ", given.num_heads(), " ", on_rank_text(*group),
      ". Give one with these options.");
  in_proj = register_module(
      "in_proj", ColumnParallelLinear(
                     ColumnParallelLinearOptions(width, 3 * width)
                         .bias(options.bias())
                         .partitions(3)
                         .sequence_parallel(options.sequence_parallel())
                         .process_group(group),
                     whole->in_proj_weight, whole->in_proj_bias));
  out_proj = register_module(
      "out_proj", RowParallelLinear(
                      RowParallelLinearOptions(width, width)
                          .bias(options.bias())
                          .sequence_parallel(options.sequence_parallel())
                          .process_group(group),
                      whole->out_proj->weight, whole->out_proj->bias));
}

void ParallelMultiheadAttentionImpl::reset() {
  if (in_proj) {  // a clone, which gets layers of its own
    const auto copy_of = [](const auto& layer) {
      using Impl = typename std::decay_t<decltype(layer)>::ContainedType;
      return std::dynamic_pointer_cast<Impl>(layer->clone());
    };
    in_proj = register_module("in_proj", ColumnParallelLinear(copy_of(in_proj)));
    out_proj = register_module("out_proj", RowParallelLinear(copy_of(out_proj)));
    return;
  }
  check_options();
  const torch::nn::MultiheadAttention whole(
      torch::nn::MultiheadAttentionOptions(options.embed_dim(), options.num_heads())
          .bias(options.bias()));
  check_drawn_alike(kAttention, whole->in_proj_weight, options.process_group().get());
  cut(whole);
}

void ParallelMultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::ParallelMultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads()
         << ", ranks=" << options.process_group().get()->getSize() << ")";
}

at::Tensor ParallelMultiheadAttentionImpl::forward(const at::Tensor& input) {
  const auto group = options.process_group().get();
  DDP_CHECK_VALUE(
      input.defined() && input.dim() == 3 && input.size(2) == options.embed_dim(), kAttention,
      ": expected an input [T, N, ", options.embed_dim(), "], got ", sizes_text(input), " ",
      on_rank_text(*group), ". Positions come first, then the batch.");
  const int64_t head = options.embed_dim() / options.num_heads();
  const auto heads = in_proj
                         ->forward(input)               // [T, N, 3 * own heads * head]
                         .unflatten(-1, {3, -1, head})  // [T, N, 3, own heads, head]
                         .permute({2, 1, 3, 0, 4});     // [3, N, own heads, T, head]
  const double dropout = is_training() ? options.dropout() : 0.0;
  std::optional<TensorParallelRng> own_numbers;
  if (dropout > 0) own_numbers.emplace(group);
  const auto attended = at::scaled_dot_product_attention(
      heads[0], heads[1], heads[2], /*attn_mask=*/{}, dropout, options.is_causal());
  own_numbers.reset();
  return out_proj->forward(attended.permute({2, 0, 1, 3}).flatten(2));  // [T, N, own width]
}

}  // namespace ddp
