#include <ddp/functional.h>

#include <numeric>

#include <c10/core/WrapDimMinimal.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

#include "functional/region.h"

namespace ddp::functional {
namespace {

using Kind = Exchange::Kind;

at::Tensor run(
    const char* call, Kind kind, const at::Tensor& t, const GroupArg& group_arg, int64_t dim = 0) {
  const auto group = group_arg.get();
  DDP_CHECK_VALUE(
      t.defined(), call, ": expected a tensor, got an undefined one ", on_rank_text(*group),
      ". Pass what the layer before returned.");
  if (group->getSize() == 1) return t;
  return apply_exchange(t, c10::make_intrusive<Exchange>(kind, group, dim));
}

int64_t dimension(
    const char* call, const at::Tensor& t, int64_t dim, const c10d::ProcessGroup& group) {
  const int64_t dims = t.defined() ? t.dim() : 0;
  DDP_CHECK_VALUE(
      dim >= -dims && dim < dims, call, ": expected a dimension of a tensor with ", dims, ", got ",
      dim, " ", on_rank_text(group), ". Count from 0, or from -1 backwards.");
  return dim < 0 ? dim + dims : dim;
}

/// The same for a dimension that is cut into equal parts.
int64_t cut_dimension(
    const char* call, const at::Tensor& t, int64_t dim, const c10d::ProcessGroup& group) {
  const int64_t index = dimension(call, t, dim, group);
  DDP_CHECK_VALUE(
      t.size(index) % group.getSize() == 0, call, ": expected dimension ", dim,
      " to be a multiple of the group's ", group.getSize(), " ranks, got ", t.sizes(), " ",
      on_rank_text(group), ". Pad it, or use fewer ranks.");
  return index;
}

void check_splits(
    const at::Tensor& t, const std::vector<int64_t>& splits, const char* name,
    const c10d::ProcessGroup& group) {
  if (splits.empty()) return;
  const bool valid = static_cast<int>(splits.size()) == group.getSize() &&
                     std::all_of(splits.begin(), splits.end(), [](int64_t n) { return n >= 0; });
  DDP_CHECK_VALUE(
      valid, "all_to_all: expected ", name, " of one number of rows for each of the ",
      group.getSize(), " ranks, got [", joined_by(", ", splits), "] for ", t.sizes(), " ",
      on_rank_text(group), ". Give 0 for a rank without rows.");
}

}  // namespace

at::Tensor copy_to_region(const at::Tensor& t, const GroupArg& group) {
  return run("copy_to_region", Kind::kCopy, t, group);
}

at::Tensor reduce_from_region(const at::Tensor& t, const GroupArg& group) {
  return run("reduce_from_region", Kind::kSum, t, group);
}

at::Tensor scatter_to_region(const at::Tensor& t, const GroupArg& group, int64_t dim) {
  constexpr const char* kCall = "scatter_to_region";
  return run(kCall, Kind::kTakePart, t, group, cut_dimension(kCall, t, dim, *group.get()));
}

at::Tensor gather_from_region(const at::Tensor& t, const GroupArg& group, int64_t dim) {
  constexpr const char* kCall = "gather_from_region";
  return run(kCall, Kind::kJoin, t, group, dimension(kCall, t, dim, *group.get()));
}

at::Tensor all_gather(const at::Tensor& t, int64_t dim, const GroupArg& group) {
  constexpr const char* kCall = "functional::all_gather";
  return run(kCall, Kind::kJoinToBeSummed, t, group, dimension(kCall, t, dim, *group.get()));
}

at::Tensor reduce_scatter(const at::Tensor& t, int64_t dim, const GroupArg& group) {
  constexpr const char* kCall = "functional::reduce_scatter";
  return run(kCall, Kind::kReduceScatter, t, group, cut_dimension(kCall, t, dim, *group.get()));
}

at::Tensor all_to_all(
    const at::Tensor& t, const std::vector<int64_t>& input_splits,
    const std::vector<int64_t>& output_splits, const GroupArg& group_arg) {
  constexpr const char* kCall = "functional::all_to_all";
  const auto group = group_arg.get();
  dimension(kCall, t, 0, *group);
  check_splits(t, input_splits, "input_splits", *group);
  check_splits(t, output_splits, "output_splits", *group);
  if (input_splits.empty()) cut_dimension(kCall, t, 0, *group);
  const int64_t sent = std::accumulate(input_splits.begin(), input_splits.end(), int64_t{0});
  DDP_CHECK_VALUE(
      input_splits.empty() || sent == t.size(0), kCall, ": expected input_splits whose sum is the ",
      t.size(0), " rows of ", t.sizes(), ", got [", joined_by(", ", input_splits), "] ",
      on_rank_text(*group), ". Send each row to one rank.");
  DDP_CHECK_VALUE(
      input_splits.empty() == output_splits.empty(), kCall,
      ": expected both splits or none, got one of them ", on_rank_text(*group), ". Give both.");
  if (group->getSize() == 1) return t;
  return apply_exchange(
      t, c10::make_intrusive<Exchange>(Kind::kAllToAll, group, 0, input_splits, output_splits));
}

}  // namespace ddp::functional
