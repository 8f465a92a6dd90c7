#pragma once

#include <memory>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/c10d_names.h>

#include "calls/call_history.h"
#include "group/owned_process_group.h"

namespace ddp {

/// A process group that records the collectives that this rank starts in it.
class RecordedGroup : public OwnedProcessGroup {
 public:
  using OwnedProcessGroup::OwnedProcessGroup;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr DDP_GROUP_ALL_GATHER_SINGLE(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr DDP_GROUP_REDUCE_SCATTER_SINGLE(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  // Not recorded, because they are not collectives.
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  /// Records `call` and starts it. For calls that go directly to a backend.
  WorkPtr record(
      CallHistory::Lane lane, const CollectiveCall& call, c10::function_ref<WorkPtr()> start);

 protected:
  std::shared_ptr<const CallHistory> calls() const { return calls_; }

 private:
  const std::shared_ptr<CallHistory> calls_ = std::make_shared<CallHistory>();
};

/// Starts a collective directly in a backend, and records it if the group is one of this library's.
c10::intrusive_ptr<c10d::Work> start_recorded(
    c10d::ProcessGroup& group, c10::Device device, const CollectiveCall& call,
    c10::function_ref<c10::intrusive_ptr<c10d::Work>()> start);

}  // namespace ddp
