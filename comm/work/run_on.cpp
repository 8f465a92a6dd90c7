#include "work/run_on.h"

#include <algorithm>
#include <vector>

#include <ddp/internal/c10d_names.h>

#include "work/exchange_flat.h"

namespace ddp {
namespace {

using Kind = CollectiveKind;
using OpType = c10d::OpType;
using Tensors = Collective::Tensors;

/// c10d's options, of which a Collective has these members.
template <typename Options>
Options timed(const Collective& c) {
  Options options;
  options.timeout = c.timeout;
  return options;
}
template <typename Options>
Options rooted(const Collective& c) {
  auto options = timed<Options>(c);
  options.rootRank = c.root;
  return options;
}
template <typename Options>
Options reducing(Options options, const Collective& c) {
  options.reduceOp = c.op;
  return options;
}

WorkPtr all_reduce_on(c10d::Backend& backend, const Collective& c) {
  auto tensors = c.in;
  const auto options = reducing(timed<c10d::AllreduceCoalescedOptions>(c), c);
  if (c.type == OpType::_ALLREDUCE_SPARSE) return backend.allreduce_sparse(tensors, options);
  if (c.type == OpType::ALLREDUCE) return backend.allreduce(tensors, options);
  return backend.allreduce_coalesced(tensors, options);
}

std::vector<int64_t> rows_of(const Tensors& parts, const at::Tensor& whole) {
  const auto of_row = whole.numel() / std::max<int64_t>(1, whole.dim() > 0 ? whole.size(0) : 1);
  std::vector<int64_t> rows;
  for (const auto& part : parts) rows.push_back(of_row == 0 ? 0 : part.numel() / of_row);
  return rows;
}

WorkPtr all_to_all_on(c10d::Backend& backend, const Collective& c) {
  const auto options = timed<c10d::AllToAllOptions>(c);
  if (!c.whole_in.defined()) {
    return exchange_flat(c.out, c.in, [&](auto& to, auto& from, auto& received, auto& sent) {
      return backend.DDP_ALL_TO_ALL_SINGLE(to, from, received, sent, options);
    });
  }
  auto to = c.whole_out, from = c.whole_in;
  auto received = rows_of(c.out, to), sent = rows_of(c.in, from);
  return backend.DDP_ALL_TO_ALL_SINGLE(to, from, received, sent, options);
}

}  // namespace

WorkPtr run_on(c10d::Backend& backend, const Collective& c) {
  auto in = c.in, out = c.out;
  auto to = c.whole_out, from = c.whole_in;
  std::vector<Tensors> of_each;
  switch (c.kind) {
    case Kind::kAllReduce:
      return all_reduce_on(backend, c);
    case Kind::kBroadcast:
      return backend.broadcast(in, rooted<c10d::BroadcastOptions>(c));
    case Kind::kReduce:
      return backend.reduce(in, reducing(rooted<c10d::ReduceOptions>(c), c));
    case Kind::kAllGather:
      if (to.defined())
        return backend.DDP_ALL_GATHER_SINGLE(to, in[0], timed<c10d::AllgatherOptions>(c));
      of_each = {out};
      return backend.allgather(of_each, in, timed<c10d::AllgatherOptions>(c));
    case Kind::kGather:
      if (!out.empty()) of_each = {out};
      return backend.gather(of_each, in, rooted<c10d::GatherOptions>(c));
    case Kind::kScatter:
      if (!in.empty()) of_each = {in};
      return backend.scatter(out, of_each, rooted<c10d::ScatterOptions>(c));
    case Kind::kReduceScatter: {
      const auto options = reducing(timed<c10d::ReduceScatterOptions>(c), c);
      if (from.defined()) return backend.DDP_REDUCE_SCATTER_SINGLE(out[0], from, options);
      of_each = {in};
      return backend.reduce_scatter(out, of_each, options);
    }
    case Kind::kAllToAll:
      return all_to_all_on(backend, c);
    case Kind::kBarrier:
      return backend.barrier(timed<c10d::BarrierOptions>(c));
    case Kind::kDifferentiable:
    case Kind::kMessage:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "no collective");
}

}  // namespace ddp
