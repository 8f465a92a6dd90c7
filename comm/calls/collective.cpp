#include <ddp/collective.h>

#include <array>
#include <numeric>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/ScalarType.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

#include "calls/collective_call.h"

namespace ddp {

using Kind = CollectiveKind;
using OpType = c10d::OpType;
using Tensors = Collective::Tensors;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

constexpr std::array kKinds{
    "all_reduce", "broadcast", "all_gather", "reduce_scatter",      "barrier",     "reduce",
    "gather",     "scatter",   "all_to_all", "differentiable call", "send or recv"};

WorkPtr all_reduce_on(c10d::Backend& backend, const Collective& c) {
  auto tensors = c.in;
  const auto options = c.options<c10d::AllreduceCoalescedOptions>();
  // As c10d::ProcessGroup does.
  if (c.in[0].is_sparse() && !c.in[0].is_cpu()) return backend.allreduce_sparse(tensors, options);
  if (c.type == OpType::ALLREDUCE) return backend.allreduce(tensors, options);
  return backend.allreduce_coalesced(tensors, options);
}

WorkPtr all_to_all_on(c10d::Backend& backend, const Collective& c) {
  const auto options = c.options<c10d::AllToAllOptions>();
  auto in = c.in, out = c.out;
  if (!c.whole_in.defined()) return backend.alltoall(out, in, options);
  auto to = c.whole_out, from = c.whole_in;
  auto received = c.out_rows, sent = c.in_rows;
  return backend.DDP_ALL_TO_ALL_SINGLE(to, from, received, sent, options);
}

WorkPtr call_method(c10d::Backend& backend, const Collective& c) {
  auto in = c.in, out = c.out;
  auto to = c.whole_out, from = c.whole_in;
  std::vector<Tensors> of_each;
  switch (c.kind) {
    case Kind::AllReduce:
      return all_reduce_on(backend, c);
    case Kind::Broadcast:
      return backend.broadcast(in, c.options<c10d::BroadcastOptions>());
    case Kind::Reduce:
      return backend.reduce(in, c.options<c10d::ReduceOptions>());
    case Kind::AllGather:
      if (to.defined()) {
        return backend.DDP_ALL_GATHER_SINGLE(to, in[0], c.options<c10d::AllgatherOptions>());
      }
      of_each = {out};
      return backend.allgather(of_each, in, c.options<c10d::AllgatherOptions>());
    case Kind::Gather:
      if (!out.empty()) of_each = {out};
      return backend.gather(of_each, in, c.options<c10d::GatherOptions>());
    case Kind::Scatter:
      if (!in.empty()) of_each = {in};
      return backend.scatter(out, of_each, c.options<c10d::ScatterOptions>());
    case Kind::ReduceScatter: {
      const auto options = c.options<c10d::ReduceScatterOptions>();
      if (from.defined()) return backend.DDP_REDUCE_SCATTER_SINGLE(out[0], from, options);
      of_each = {in};
      return backend.reduce_scatter(out, of_each, options);
    }
    case Kind::AllToAll:
      return all_to_all_on(backend, c);
    case Kind::Barrier:
      return backend.barrier(c.options<c10d::BarrierOptions>());
    case Kind::Differentiable:
    case Kind::Message:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "no collective");
}

}  // namespace

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

uint64_t CollectiveCall::hash() const {
  uint64_t hash = mixed(1, static_cast<uint64_t>(kind));
  for (const int64_t field : {int64_t{dtype}, int64_t{reduction}, int64_t{root}}) {
    hash = mixed(hash, static_cast<uint64_t>(field));
  }
  return mixed(mixed(mixed(hash, tensors), sizes), numel);
}

bool CollectiveCall::is_known() const {
  return static_cast<size_t>(kind) < kKinds.size() && dtype >= -1 &&
         dtype < static_cast<int>(c10::ScalarType::NumOptions) && reduction >= -1 &&
         reduction <= static_cast<int>(c10d::ReduceOp::UNUSED);
}

CollectiveCall describe_call(
    CollectiveKind kind, at::ArrayRef<at::Tensor> tensors, int reduction, int64_t root) {
  CollectiveCall call;
  call.kind = kind;
  call.reduction = static_cast<int8_t>(reduction);
  call.root = static_cast<int32_t>(root);
  if (tensors.empty()) return call;
  call.dtype = static_cast<int8_t>(tensors[0].scalar_type());
  if (kind == CollectiveKind::AllToAll) return call;
  call.tensors = static_cast<uint32_t>(tensors.size());
  call.sizes = tensors.size() > 1 ? 1 : 0;
  for (const auto& tensor : tensors) {
    const auto numel = static_cast<uint64_t>(tensor.numel());
    call.numel += numel;
    if (tensors.size() > 1) call.sizes = mixed(call.sizes, numel);
  }
  return call;
}

const char* to_text(CollectiveKind kind) { return kKinds.at(static_cast<size_t>(kind)); }

std::string to_text(const CollectiveCall& call) {
  std::string text = to_text(call.kind);
  if (call.dtype < 0) return text;
  const auto dtype = static_cast<c10::ScalarType>(call.dtype);
  if (call.kind == CollectiveKind::AllToAll) return ddp::str(text, " of ", dtype);
  text += ddp::str(" of ", call.numel, " x ", dtype);
  // The hash of the sizes is shown, because it may be all that differs.
  if (call.tensors > 1) {
    text += ddp::str(" in ", call.tensors, " tensors of sizes #", call.sizes % 10000);
  }
  if (call.kind == CollectiveKind::Differentiable) {
    return text +
           (call.reduction == 1 ? " that requires a gradient" : " that requires no gradient");
  }
  if (call.root >= 0) {
    const bool sends =
        call.kind == CollectiveKind::Broadcast || call.kind == CollectiveKind::Scatter;
    text += ddp::str(sends ? " from rank " : " to rank ", call.root);
  }
  if (call.reduction >= 0) {
    text += ddp::str(", ", to_text(static_cast<ReductionTable::Op>(call.reduction)));
  }
  return text;
}

WorkPtr run_on(c10d::Backend& backend, Collective collective) {
  auto* const runner = dynamic_cast<CollectiveRunner*>(&backend);
  return runner ? runner->run(std::move(collective)) : call_method(backend, collective);
}

}  // namespace ddp
