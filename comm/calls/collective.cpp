#include "calls/collective.h"

#include <numeric>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/check.h>

namespace ddp {

using Kind = CollectiveKind;
using OpType = c10d::OpType;
using Tensors = Collective::Tensors;

Collective::Tensors Collective::results() const {
  return whole_out.defined() ? Tensors{whole_out} : out;
}

CollectiveCall Collective::described() const {
  const bool reduces =
      kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
  const int reduction = reduces ? static_cast<int>(op.op_) : -1;
  if (whole_in.defined()) return describe_call(kind, whole_in, reduction, root);
  return describe_call(kind, kind == Kind::kScatter ? out : in, reduction, root);
}

Collective CollectiveForms::all_reduce(
    OpType type, const Tensors& t, const c10d::AllreduceOptions& o) const {
  DDP_CHECK_VALUE(!t.empty(), "all_reduce: expected a tensor, got none on rank ", rank_, ".");
  Collective c{Kind::kAllReduce, type, o.timeout, t, t};
  c.op = o.reduceOp;
  return c;
}

Collective CollectiveForms::broadcast(const Tensors& t, const c10d::BroadcastOptions& o) const {
  check_one("broadcast", t);
  check_root("broadcast", o.rootRank);
  Collective c{Kind::kBroadcast, OpType::BROADCAST, o.timeout, t, t};
  c.root = static_cast<int>(o.rootRank);
  return c;
}

Collective CollectiveForms::reduce(const Tensors& t, const c10d::ReduceOptions& o) const {
  check_one("reduce", t);
  check_root("reduce", o.rootRank);
  Collective c{Kind::kReduce, OpType::REDUCE, o.timeout, t, t};
  c.op = o.reduceOp;
  c.root = static_cast<int>(o.rootRank);
  return c;
}

Collective CollectiveForms::all_gather(
    const std::vector<Tensors>& to, const Tensors& from, const c10d::AllgatherOptions& o) const {
  check_one("all_gather", from);
  const auto& out = each("all_gather", to);
  check_alike("all_gather", out, from[0], from[0].numel());
  Collective c{Kind::kAllGather, OpType::ALLGATHER, o.timeout, from, out};
  return c;
}

Collective CollectiveForms::all_gather(
    const at::Tensor& to, const at::Tensor& from, const c10d::AllgatherOptions& o) const {
  check_alike("all_gather", {to}, from, from.numel() * size_);
  Collective c{Kind::kAllGather, OpType::_ALLGATHER_BASE, o.timeout, {from}};
  c.out = parts(Kind::kAllGather, to, {});
  c.whole_out = to;
  return c;
}

Collective CollectiveForms::gather(
    const std::vector<Tensors>& to, const Tensors& from, const c10d::GatherOptions& o) const {
  check_one("gather", from);
  check_root("gather", o.rootRank);
  Collective c{Kind::kGather, OpType::GATHER, o.timeout, from};
  c.root = static_cast<int>(o.rootRank);
  if (c.root == rank_) {
    c.out = each("gather", to);
    check_alike("gather", c.out, from[0], from[0].numel());
  } else {
    check_lists_of("gather", /*is_root=*/false, to.size());
  }
  return c;
}

Collective CollectiveForms::scatter(
    const Tensors& to, const std::vector<Tensors>& from, const c10d::ScatterOptions& o) const {
  check_one("scatter", to);
  check_root("scatter", o.rootRank);
  Collective c{Kind::kScatter, OpType::SCATTER, o.timeout};
  c.root = static_cast<int>(o.rootRank);
  if (c.root == rank_) {
    c.in = each("scatter", from);
    check_alike("scatter", c.in, to[0], to[0].numel());
  } else {
    check_lists_of("scatter", /*is_root=*/false, from.size());
  }
  c.out = to;
  return c;
}

Collective CollectiveForms::reduce_scatter(
    const Tensors& to, const std::vector<Tensors>& from,
    const c10d::ReduceScatterOptions& o) const {
  check_one("reduce_scatter", to);
  const auto& in = each("reduce_scatter", from);
  check_alike("reduce_scatter", {in[static_cast<size_t>(rank_)]}, to[0], to[0].numel());
  Collective c{Kind::kReduceScatter, OpType::REDUCE_SCATTER, o.timeout, in, to};
  c.op = o.reduceOp;
  return c;
}

Collective CollectiveForms::reduce_scatter(
    const at::Tensor& to, const at::Tensor& from, const c10d::ReduceScatterOptions& o) const {
  check_alike("reduce_scatter", {from}, to, to.numel() * size_);
  Collective c{Kind::kReduceScatter, OpType::_REDUCE_SCATTER_BASE, o.timeout};
  c.whole_in = from.contiguous();
  c.in = parts(Kind::kReduceScatter, c.whole_in, {});
  c.out = {to};
  c.op = o.reduceOp;
  return c;
}

Collective CollectiveForms::all_to_all(
    const Tensors& to, const Tensors& from, const c10d::AllToAllOptions& o) const {
  check_count("all_to_all", to);
  check_count("all_to_all", from);
  Collective c{Kind::kAllToAll, OpType::ALLTOALL, o.timeout, from, to};
  return c;
}

Collective CollectiveForms::all_to_all(
    const at::Tensor& to, const at::Tensor& from, const Splits& to_splits,
    const Splits& from_splits, const c10d::AllToAllOptions& o) const {
  Collective c{Kind::kAllToAll, OpType::ALLTOALL_BASE, o.timeout};
  c.whole_in = from.contiguous();
  c.whole_out = to;
  c.in = parts(Kind::kAllToAll, c.whole_in, from_splits);
  c.out = parts(Kind::kAllToAll, to, to_splits);
  return c;
}

void CollectiveForms::check_one(const char* call, const Tensors& tensors) const {
  DDP_CHECK_VALUE(
      tensors.size() == 1, call, ": expected one tensor, got ", tensors.size(), " on rank ", rank_,
      " of ", size_, ". Call it once for each.");
}

void CollectiveForms::check_root(const char* call, int64_t root) const {
  DDP_CHECK_VALUE(
      root >= 0 && root < size_, call, ": expected a root of the group, 0 to ", size_ - 1, ", got ",
      root, " on rank ", rank_, ". Give a rank of the group.");
}

void CollectiveForms::check_lists_of(const char* call, bool is_root, size_t lists) const {
  DDP_CHECK_VALUE(
      lists == (is_root ? 1 : 0), call, ": expected ", is_root ? "a list of tensors" : "no list",
      is_root ? " at the root" : " elsewhere than at the root", ", got ", lists, " on rank ", rank_,
      " of ", size_, ". Give the root one tensor for each rank.");
}

const Collective::Tensors& CollectiveForms::each(const char* call, const TensorLists& lists) const {
  check_lists_of(call, /*is_root=*/true, lists.size());
  check_count(call, lists[0]);
  return lists[0];
}

void CollectiveForms::check_count(const char* call, const Tensors& tensors) const {
  DDP_CHECK_VALUE(
      tensors.size() == static_cast<size_t>(size_), call, ": expected ", size_,
      " tensors, one for each rank, got ", tensors.size(), " on rank ", rank_, ". Give ", size_,
      ".");
}

void CollectiveForms::check_alike(
    const char* call, const Tensors& tensors, const at::Tensor& like, int64_t numel) const {
  for (const auto& tensor : tensors) {
    DDP_CHECK_VALUE(
        tensor.numel() == numel && tensor.scalar_type() == like.scalar_type() &&
            tensor.device() == like.device(),
        call, ": expected a tensor of ", numel, " x ", like.scalar_type(), " on ", like.device(),
        ", got one of ", tensor.numel(), " x ", tensor.scalar_type(), " on ", tensor.device(),
        " on rank ", rank_, " of ", size_, ". Give tensors whose sizes fit the number of ranks.");
  }
}

Collective::Tensors CollectiveForms::parts(
    Kind kind, const at::Tensor& whole, const Splits& splits) const {
  if (size_ == 1) return {whole};
  const char* call = to_text(kind);
  DDP_CHECK_VALUE(
      whole.is_contiguous(), call, ": expected a contiguous output, got one of strides ",
      whole.strides(), " on rank ", rank_, " of ", size_, ". Call contiguous().");
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const auto flat = whole.view({-1});
  if (splits.empty()) {
    // The elements of the other kinds were counted before; an all-to-all parts rows.
    DDP_CHECK_VALUE(
        kind != Kind::kAllToAll || (whole.dim() > 0 && whole.size(0) % size_ == 0), call,
        ": expected as many rows for each of ", size_, " ranks, got a tensor of sizes ",
        whole.sizes(), " on rank ", rank_, ". Give splits.");
    return flat.split_with_sizes(Splits(static_cast<size_t>(size_), whole.numel() / size_));
  }
  const auto rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  DDP_CHECK_VALUE(
      splits.size() == static_cast<size_t>(size_) && whole.dim() > 0 && rows == whole.size(0), call,
      ": expected ", size_, " splits whose sum is the first dimension of ", whole.sizes(), ", got ",
      splits, " on rank ", rank_, ". Give the rows for each rank.");
  const auto of_row = rows == 0 ? 0 : whole.numel() / rows;
  Splits numels;
  for (const auto split : splits) numels.push_back(split * of_row);
  return flat.split_with_sizes(numels);
}

}  // namespace ddp
