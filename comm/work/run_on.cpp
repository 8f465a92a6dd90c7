#include <ddp/collective_backend.h>

#include <utility>
#include <vector>

#include "work/collective_handle.h"

namespace ddp {
namespace {

using Kind = CollectiveKind;
using OpType = c10d::OpType;
using Tensors = Collective::Tensors;

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

WorkPtr run_on(c10d::Backend& backend, Collective collective) {
  auto* const runner = dynamic_cast<CollectiveRunner*>(&backend);
  return runner ? runner->run(std::move(collective)) : call_method(backend, collective);
}

}  // namespace ddp
