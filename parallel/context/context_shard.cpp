#include <vector>

#include <ATen/ATen.h>
#include <ddp/context_parallel.h>
#include <ddp/functional.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>

#include "context/attention_parts.h"

namespace ddp::functional {
namespace {

void check_length(
    const char* call, int64_t length, int64_t divisor, const c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      length > 0 && length % divisor == 0, call, ": expected a length that is a multiple of ",
      divisor, ", got ", length, " ", on_rank_text(group),
      ". Pad the sequence, and ignore the padding in the loss.");
}

int64_t length_of(const at::Tensor& t, int64_t dim, const char* call, const c10d::ProcessGroup& g) {
  DDP_CHECK_VALUE(
      t.defined() && dim >= -t.dim() && dim < t.dim(), call,
      ": expected a dimension of the tensor, got ", dim, " ", on_rank_text(g),
      ". Give that of the positions.");
  return t.size(dim);
}

}  // namespace

at::Tensor order_of_ranks(int64_t length, int ranks) {
  const auto pieces = at::arange(length, at::kLong).view({2 * ranks, -1});
  std::vector<at::Tensor> order;
  for (int rank = 0; rank < ranks; ++rank) {
    order.push_back(pieces[rank]);
    order.push_back(pieces[2 * ranks - 1 - rank]);
  }
  return at::cat(order);
}

at::Tensor context_shard(const at::Tensor& t, int64_t dim, const GroupArg& group_arg) {
  constexpr const char* kCall = "context_shard";
  const auto group = group_arg.get();
  const int64_t length = length_of(t, dim, kCall, *group);
  const int ranks = group->getSize();
  check_length(kCall, length, 2 * ranks, *group);
  if (ranks == 1) return t;
  const auto ordered = t.index_select(dim, order_of_ranks(length, ranks).to(t.device()));
  return scatter_to_region(ordered, group, dim);
}

at::Tensor context_gather(const at::Tensor& t, int64_t dim, const GroupArg& group_arg) {
  constexpr const char* kCall = "context_gather";
  const auto group = group_arg.get();
  const int64_t length = length_of(t, dim, kCall, *group);
  const int ranks = group->getSize();
  check_length(kCall, length, 2, *group);
  if (ranks == 1) return t;
  const auto whole = gather_from_region(t, group, dim);
  return whole.index_select(dim, order_of_ranks(length * ranks, ranks).argsort().to(t.device()));
}

at::Tensor context_positions(int64_t length, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  const int ranks = group->getSize();
  check_length("context_positions", length, 2 * ranks, *group);
  return order_of_ranks(length, ranks).chunk(ranks)[static_cast<size_t>(group->getRank())];
}

}  // namespace ddp::functional
