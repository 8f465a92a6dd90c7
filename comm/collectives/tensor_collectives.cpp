// The collectives of <ddp/collectives.h> from one tensor into one tensor.
#include <ddp/collectives.h>

#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>

#include "collectives/arguments.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

void check_alike(
    const char* call, const char* name, const at::Tensor& tensor, const char* other_name,
    const at::Tensor& other, c10d::ProcessGroup& group) {
  check_tensor(call, tensor, group);
  check_tensor(call, other, group);
  DDP_CHECK_VALUE(
      tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device(), call,
      ": expected ", name, " of dtype ", other.scalar_type(), " on ", other.device(), " as ",
      other_name, ", got ", tensor.scalar_type(), " on ", tensor.device(), " ", on_rank_text(group),
      ". Make both alike.");
}

/// Checks that `tensor` is like `other`, with world-size times as many elements.
void check_whole(
    const char* call, const char* name, const at::Tensor& tensor, const char* other_name,
    const at::Tensor& other, c10d::ProcessGroup& group) {
  check_alike(call, name, tensor, other_name, other, group);
  DDP_CHECK_VALUE(
      tensor.numel() == other.numel() * group.getSize(), call, ": expected ", name, " of ",
      other.numel() * group.getSize(), " elements, those of ", other_name,
      " once for each rank, got ", tensor.numel(), " ", on_rank_text(group),
      ". The ranks' parts lie in it one after the other.");
}

/// Returns how many rows of a tensor belong to each rank: as given, or the same number for each.
std::vector<int64_t> splits_of(
    const char* name, const at::Tensor& tensor, const std::vector<int64_t>& given,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensor.dim() > 0, "all_to_all_single: expected ", name,
      " with a first dimension to cut, got a scalar ", on_rank_text(group), ". Use view({1}).");
  const auto world = static_cast<size_t>(group.getSize());
  const auto rows = tensor.size(0);
  if (given.empty()) {
    DDP_CHECK_VALUE(
        rows % group.getSize() == 0, "all_to_all_single: expected ", name,
        " with as many rows for each of ", world, " ranks, got ", rows, " ", on_rank_text(group),
        ". Pass split sizes.");
    return std::vector<int64_t>(world, rows / group.getSize());
  }
  int64_t sum = 0;
  bool negative = false;
  for (const auto split : given) {
    sum += split;
    negative = negative || split < 0;
  }
  DDP_CHECK_VALUE(
      given.size() == world && !negative && sum == rows, "all_to_all_single: expected ", world,
      " split sizes of at least 0 for ", name, " that add up to its ", rows, " rows, got ",
      c10::IntArrayRef(given), " ", on_rank_text(group),
      ". One for each rank, in the order of ranks.");
  return given;
}

// Converts rows to elements of the wire: a dtype that is sent as bytes has more of them.
void scale_to_elements(std::vector<int64_t>& rows, const at::Tensor& wire) {
  const auto all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  for (auto& count : rows) count *= all == 0 ? 0 : wire.numel() / all;
}

// This rank's part of a flat tensor with a part for each rank.
at::Tensor own_part(const at::Tensor& whole, c10d::ProcessGroup& group) {
  const auto numel = whole.numel() / group.getSize();
  return whole.narrow(0, group.getRank() * numel, numel);
}

}  // namespace

WorkPtr all_gather_into_tensor_async(
    at::Tensor& output, const at::Tensor& input, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_whole("all_gather_into_tensor", "output", output, "input", input, *group);
  const auto to = wire_of(output);
  auto to_wire = to.wire.view({-1});
  const auto plain = wire_of(input);
  const auto input_wire =
      apart_from({to}, plain, begin_alike(own_part(to_wire, *group), plain.wire));
  auto from = input_wire.wire.view({-1});
  return monitored("all_gather_into_tensor", *group, input.device(), [&] {
    return copying_out({{group->DDP_GROUP_ALL_GATHER_SINGLE(to_wire, from)}}, {to}, {input_wire});
  });
}

WorkPtr reduce_scatter_tensor_async(
    at::Tensor& output, const at::Tensor& input, c10d::ReduceOp op, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_whole("reduce_scatter_tensor", "input", input, "output", output, *group);
  const auto reduction = wire_reduction("reduce_scatter_tensor", op, output, *group);
  const auto to = reduction_wire_of(output, reduction);
  auto to_wire = to.wire.view({-1});
  const auto plain = reduction_wire_of(input, reduction);
  const auto own = own_part(plain.wire.view({-1}), *group);
  const auto input_wire = apart_from({to}, plain, begin_alike(own, to_wire));
  auto from = input_wire.wire.view({-1});
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction.op;
  return monitored("reduce_scatter_tensor", *group, output.device(), [&] {
    return copying_out(
        {{group->DDP_GROUP_REDUCE_SCATTER_SINGLE(to_wire, from, options)}}, {to}, {input_wire},
        reduction.divisor);
  });
}

WorkPtr all_to_all_single_async(
    at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
    const std::vector<int64_t>& input_splits, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_alike("all_to_all_single", "output", output, "input", input, *group);
  auto received = splits_of("output", output, output_splits, *group);
  auto sent = splits_of("input", input, input_splits, *group);
  const auto rank = static_cast<size_t>(group->getRank());
  DDP_CHECK_VALUE(
      output.sizes().slice(1) == input.sizes().slice(1) && received[rank] == sent[rank],
      "all_to_all_single: expected an output whose rows are the input's, and as many of them from "
      "this rank as it sends to itself, got input ",
      input.sizes(), " with ", sent[rank], " and output ", output.sizes(), " with ", received[rank],
      " ", on_rank_text(*group), ". Make what a rank receives as large as what is sent to it.");
  const auto to = wire_of(output);
  const auto input_wire = apart_from({to}, wire_of(input));
  auto to_wire = to.wire.view({-1});
  auto from = input_wire.wire.view({-1});
  scale_to_elements(received, to_wire);
  scale_to_elements(sent, from);
  return monitored("all_to_all_single", *group, input.device(), [&] {
    return copying_out(
        {{group->DDP_GROUP_ALL_TO_ALL_SINGLE(to_wire, from, received, sent)}}, {to}, {input_wire});
  });
}

void all_gather_into_tensor(at::Tensor& output, const at::Tensor& input, const GroupArg& group) {
  all_gather_into_tensor_async(output, input, group)->wait();
}

void reduce_scatter_tensor(
    at::Tensor& output, const at::Tensor& input, c10d::ReduceOp op, const GroupArg& group) {
  reduce_scatter_tensor_async(output, input, op, group)->wait();
}

void all_to_all_single(
    at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
    const std::vector<int64_t>& input_splits, const GroupArg& group) {
  all_to_all_single_async(output, input, output_splits, input_splits, group)->wait();
}

void hierarchical_all_reduce(
    at::Tensor& tensor, const GroupArg& inner_arg, const GroupArg& outer_arg, c10d::ReduceOp op) {
  const auto inner = inner_arg.get();
  const auto outer = outer_arg.get();
  check_tensor("hierarchical_all_reduce", tensor, *inner);
  const c10::NoGradGuard no_grad;
  const int64_t ranks = inner->getSize();
  const auto numel = tensor.numel();
  const auto part_size = (numel + ranks - 1) / ranks;
  auto whole = at::zeros({part_size * ranks}, tensor.options());  // zeros pad the last part
  whole.narrow(0, 0, numel).copy_(tensor.reshape({-1}));
  auto part = at::empty({part_size}, tensor.options());
  reduce_scatter_tensor(part, whole, op, inner);
  all_reduce(part, op, outer);
  all_gather_into_tensor(whole, part, inner);
  tensor.copy_(whole.narrow(0, 0, numel).view(tensor.sizes()));
}

}  // namespace ddp
