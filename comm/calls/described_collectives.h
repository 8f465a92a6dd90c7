// Which tensors, reduction and root describe a call of each collective of c10d.
#pragma once

#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "calls/collective_call.h"

namespace ddp {

/// Overrides the collectives that c10d's groups and backends have in common, and passes each call
/// with its description to start_described(). Derived classes override those whose names differ
/// between groups, backends and versions of LibTorch, and use start().
///
/// \tparam C10d  c10d::ProcessGroup, or a class of backends.
template <typename C10d>
class DescribedCollectives : public C10d {
 public:
  using C10d::C10d;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return start(
        Kind::kBroadcast, t, [&] { return C10d::broadcast(t, o); }, kNone, o.rootRank);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return start(
        Kind::kAllReduce, t, [&] { return C10d::allreduce(t, o); }, o.reduceOp.op_);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    const auto call = [&] { return C10d::allreduce_coalesced(t, o); };
    return start(Kind::kAllReduce, t, call, o.reduceOp.op_);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    const auto call = [&] { return C10d::reduce(t, o); };
    return start(Kind::kReduce, t, call, o.reduceOp.op_, o.rootRank);
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::kAllGather, first(to), [&] { return C10d::allgather(to, from, o); });
  }
  WorkPtr allgather_coalesced(
      TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::kAllGather, from, [&] { return C10d::allgather_coalesced(to, from, o); });
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o) override {
    const auto call = [&] { return C10d::gather(to, from, o); };
    return start(Kind::kGather, from, call, kNone, o.rootRank);
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override {
    const auto call = [&] { return C10d::scatter(to, from, o); };
    return start(Kind::kScatter, to, call, kNone, o.rootRank);
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    const auto call = [&] { return C10d::reduce_scatter(to, from, o); };
    return start(Kind::kReduceScatter, first(from), call, o.reduceOp.op_);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return start(Kind::kAllToAll, from, [&] { return C10d::alltoall(to, from, o); });
  }

 protected:
  using Kind = CollectiveKind;
  using Start = c10::function_ref<WorkPtr()>;
  static constexpr int kNone = -1;

  /// Starts a collective by `start`.
  ///
  /// \param device  of its tensors.
  virtual WorkPtr start_described(
      const CollectiveCall& call, c10::DeviceType device, Start start) = 0;

  /// \param described, reduction, root  of describe_call().
  WorkPtr start(
      Kind kind, at::ArrayRef<at::Tensor> described, Start start, int reduction = kNone,
      int64_t root = kNone) {
    const auto device = described.empty() ? c10::kCPU : described[0].device().type();
    return start_described(describe_call(kind, described, reduction, root), device, start);
  }

 private:
  // c10d's outer list is for the devices of a rank, of which there is one.
  static at::ArrayRef<at::Tensor> first(const TensorLists& lists) {
    return lists.empty() ? at::ArrayRef<at::Tensor>() : lists[0];
  }
};

}  // namespace ddp
