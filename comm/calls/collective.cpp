#include <ddp/collective.h>

#include <numeric>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/check.h>

#include "calls/collective_call.h"

namespace ddp {

using Kind = CollectiveKind;
using OpType = c10d::OpType;
using Tensors = Collective::Tensors;

Collective::Tensors Collective::results() const {
  return whole_out.defined() ? Tensors{whole_out} : out;
}

const at::Tensor& Collective::first() const {
  if (whole_in.defined()) return whole_in;
  if (!in.empty()) return in[0];
  return whole_out.defined() ? whole_out : out.at(0);
}

CollectiveCall Collective::described() const {
  const bool reduces =
      kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatter;
  const int reduction = reduces ? static_cast<int>(op.op_) : -1;
  const bool by_output = kind == Kind::AllGather || kind == Kind::Scatter;
  const auto& whole = by_output ? whole_out : whole_in;
  if (whole.defined()) return describe_call(kind, whole, reduction, root);
  return describe_call(kind, by_output ? out : in, reduction, root);
}

Collective::Tensors Collective::parts(const at::Tensor& whole, const Rows& rows) const {
  if (size == 1) return {whole};
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const auto flat = whole.view({-1});
  Rows numels(static_cast<size_t>(size), whole.numel() / size);
  if (!rows.empty()) {
    const auto of_row = whole.size(0) == 0 ? 0 : whole.numel() / whole.size(0);
    for (size_t rank = 0; rank < rows.size(); ++rank) numels[rank] = rows[rank] * of_row;
  }
  return flat.split_with_sizes(numels);
}

namespace detail {

Collective CollectiveForms::all_reduce(
    OpType type, const Tensors& t, const c10d::AllreduceOptions& o) const {
  DDP_CHECK_VALUE(!t.empty(), "all_reduce: expected a tensor, got none on rank ", rank_, ".");
  auto c = Collective::make(Kind::AllReduce, type, o, size_);
  c.in = c.out = t;
  return c;
}

Collective CollectiveForms::broadcast(const Tensors& t, const c10d::BroadcastOptions& o) const {
  check_one("broadcast", t);
  check_root("broadcast", o.rootRank);
  auto c = Collective::make(Kind::Broadcast, OpType::BROADCAST, o, size_);
  c.in = c.out = t;
  return c;
}

Collective CollectiveForms::reduce(const Tensors& t, const c10d::ReduceOptions& o) const {
  check_one("reduce", t);
  check_root("reduce", o.rootRank);
  auto c = Collective::make(Kind::Reduce, OpType::REDUCE, o, size_);
  c.in = c.out = t;
  return c;
}

Collective CollectiveForms::all_gather(
    const TensorLists& to, const Tensors& from, const c10d::AllgatherOptions& o) const {
  check_one("all_gather", from);
  auto c = Collective::make(Kind::AllGather, OpType::ALLGATHER, o, size_);
  c.in = from;
  c.out = each("all_gather", to);
  check_alike("all_gather", c.out, from[0], from[0].numel());
  return c;
}

Collective CollectiveForms::all_gather(
    const at::Tensor& to, const at::Tensor& from, const c10d::AllgatherOptions& o) const {
  check_alike("all_gather", {to}, from, from.numel() * size_);
  check_contiguous("all_gather", to);
  auto c = Collective::make(Kind::AllGather, OpType::_ALLGATHER_BASE, o, size_);
  c.in = {from};
  c.whole_out = to;
  return c;
}

Collective CollectiveForms::gather(
    const TensorLists& to, const Tensors& from, const c10d::GatherOptions& o) const {
  check_one("gather", from);
  check_root("gather", o.rootRank);
  auto c = Collective::make(Kind::Gather, OpType::GATHER, o, size_);
  c.in = from;
  if (c.root == rank_) {
    c.out = each("gather", to);
    check_alike("gather", c.out, from[0], from[0].numel());
  } else {
    check_lists_of("gather", /*is_root=*/false, to.size());
  }
  return c;
}

Collective CollectiveForms::scatter(
    const Tensors& to, const TensorLists& from, const c10d::ScatterOptions& o) const {
  check_one("scatter", to);
  check_root("scatter", o.rootRank);
  auto c = Collective::make(Kind::Scatter, OpType::SCATTER, o, size_);
  c.out = to;
  if (c.root == rank_) {
    c.in = each("scatter", from);
    check_alike("scatter", c.in, to[0], to[0].numel());
  } else {
    check_lists_of("scatter", /*is_root=*/false, from.size());
  }
  return c;
}

Collective CollectiveForms::reduce_scatter(
    const Tensors& to, const TensorLists& from, const c10d::ReduceScatterOptions& o) const {
  check_one("reduce_scatter", to);
  auto c = Collective::make(Kind::ReduceScatter, OpType::REDUCE_SCATTER, o, size_);
  c.in = each("reduce_scatter", from);
  check_alike("reduce_scatter", {c.in[static_cast<size_t>(rank_)]}, to[0], to[0].numel());
  c.out = to;
  return c;
}

Collective CollectiveForms::reduce_scatter(
    const at::Tensor& to, const at::Tensor& from, const c10d::ReduceScatterOptions& o) const {
  check_alike("reduce_scatter", {from}, to, to.numel() * size_);
  auto c = Collective::make(Kind::ReduceScatter, OpType::_REDUCE_SCATTER_BASE, o, size_);
  c.whole_in = from.contiguous();
  c.out = {to};
  return c;
}

Collective CollectiveForms::all_to_all(
    const Tensors& to, const Tensors& from, const c10d::AllToAllOptions& o) const {
  check_count("all_to_all", to);
  check_count("all_to_all", from);
  auto c = Collective::make(Kind::AllToAll, OpType::ALLTOALL, o, size_);
  c.in = from;
  c.out = to;
  return c;
}

Collective CollectiveForms::all_to_all(
    const at::Tensor& to, const at::Tensor& from, const Splits& to_splits,
    const Splits& from_splits, const c10d::AllToAllOptions& o) const {
  check_contiguous("all_to_all", to);
  check_rows(to, to_splits);
  check_rows(from, from_splits);
  auto c = Collective::make(Kind::AllToAll, OpType::ALLTOALL_BASE, o, size_);
  c.whole_in = from.contiguous();
  c.whole_out = to;
  c.in_rows = from_splits;
  c.out_rows = to_splits;
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

void CollectiveForms::check_contiguous(const char* call, const at::Tensor& whole) const {
  DDP_CHECK_VALUE(
      size_ == 1 || whole.is_contiguous(), call,
      ": expected a contiguous output, got one of strides ", whole.strides(), " on rank ", rank_,
      " of ", size_, ". Call contiguous().");
}

/// Checks the parts of a tensor in an all-to-all.
void CollectiveForms::check_rows(const at::Tensor& whole, const Splits& rows) const {
  if (size_ == 1) return;
  if (rows.empty()) {
    DDP_CHECK_VALUE(
        whole.dim() > 0 && whole.size(0) % size_ == 0,
        "all_to_all: expected as many rows for each of ", size_, " ranks, got a tensor of sizes ",
        whole.sizes(), " on rank ", rank_, ". Give splits.");
    return;
  }
  const auto sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  DDP_CHECK_VALUE(
      rows.size() == static_cast<size_t>(size_) && whole.dim() > 0 && sum == whole.size(0),
      "all_to_all: expected ", size_, " splits whose sum is the first dimension of ", whole.sizes(),
      ", got ", rows, " on rank ", rank_, ". Give the rows for each rank.");
}

}  // namespace detail

}  // namespace ddp
