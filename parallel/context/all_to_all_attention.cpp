#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ddp/context_parallel.h>
#include <ddp/functional.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>

#include "context/attention_parts.h"

namespace ddp::functional {
namespace {

/// From the sequence's part of all heads to the whole sequence of this rank's heads, in the order
/// of the ranks.
at::Tensor to_heads(const at::Tensor& t, const ProcessGroup& group) {
  const int64_t ranks = group->getSize();
  const auto sent = t.transpose(0, 1);                              // [heads, N, T / W, d]
  const auto blocks = functional::all_to_all(sent, {}, {}, group);  // [W * own heads, N, T / W, d]
  return blocks.unflatten(0, {ranks, -1}).permute({2, 1, 0, 3, 4}).flatten(2, 3);
}

/// Undoes to_heads().
at::Tensor to_sequence(const at::Tensor& t, const ProcessGroup& group) {
  const int64_t ranks = group->getSize();
  const auto sent = t.unflatten(2, {ranks, -1}).permute({2, 1, 0, 3, 4}).flatten(0, 1);
  return functional::all_to_all(sent, {}, {}, group).transpose(0, 1);
}

at::Tensor in_autocast_dtype(const at::Tensor& t) {
  if (!t.defined() || !at::isFloatingType(t.scalar_type())) return t;
  const auto device = t.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device)
             ? t.to(at::autocast::get_autocast_dtype(device))
             : t;
}

}  // namespace

AttentionArguments attention_arguments(
    const char* call, const at::Tensor& given_q, const at::Tensor& given_k,
    const at::Tensor& given_v, const c10d::ProcessGroup& group) {
  const auto q = in_autocast_dtype(given_q), k = in_autocast_dtype(given_k),
             v = in_autocast_dtype(given_v);
  const bool alike = q.defined() && k.defined() && v.defined() && q.dim() == 4 &&
                     k.sizes() == q.sizes() && v.sizes() == q.sizes() &&
                     k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
                     k.device() == q.device() && v.device() == q.device();
  const auto shape = [](const at::Tensor& t) {
    return t.defined() ? t.sizes() : c10::IntArrayRef();
  };
  DDP_CHECK_VALUE(
      alike && at::isFloatingType(q.scalar_type()), call,
      ": expected q, k and v [N, heads, T / W, d] of one floating dtype and device, got ", shape(q),
      ", ", shape(k), " and ", shape(v), " ", on_rank_text(group),
      ". Repeat keys and values that several heads share.");
  return {q, k, v};
}

at::Tensor whole_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
    std::optional<double> scale) {
  return at::scaled_dot_product_attention(
      q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0, is_causal, scale);
}

at::Tensor all_to_all_attention(
    const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v,
    const GroupArg& group_arg, bool is_causal, std::optional<double> scale) {
  constexpr const char* kCall = "all_to_all_attention";
  const auto group = group_arg.get();
  const auto [q, k, v] = attention_arguments(kCall, given_q, given_k, given_v, *group);
  const int ranks = group->getSize();
  if (ranks == 1) return whole_attention(q, k, v, is_causal, scale);
  DDP_CHECK_VALUE(
      q.size(1) % ranks == 0, kCall, ": expected heads that are a multiple of the group's ", ranks,
      " ranks, got ", q.sizes(), " ", on_rank_text(*group), ". Use ring_attention.");
  DDP_CHECK_VALUE(
      q.size(2) % 2 == 0, kCall,
      ": expected an even number of positions, two pieces of context_shard(), got ", q.sizes(), " ",
      on_rank_text(*group), ". Cut with it.");

  // One exchange for all three.
  const auto heads = to_heads(at::cat({q, k, v}, -1), group);
  const auto order = order_of_ranks(heads.size(2), ranks).to(q.device());
  const auto of_sequence = heads.index_select(2, order.argsort()).chunk(3, -1);
  const auto attended =
      whole_attention(of_sequence[0], of_sequence[1], of_sequence[2], is_causal, scale);
  return to_sequence(attended.index_select(2, order), group);
}

}  // namespace ddp::functional
