#include "group/recorded_group.h"

#include <utility>

namespace ddp {
namespace {

using Base = c10d::ProcessGroup;
using Kind = CollectiveKind;
using Lane = CallHistory::Lane;
using Tensors = RecordedGroup::Tensors;

Lane lane_of(const Tensors& tensors) {
  return tensors.empty() ? Lane::kCpu : CallHistory::lane_of(tensors[0].device().type());
}

Lane lane_of(const at::Tensor& tensor) { return CallHistory::lane_of(tensor.device().type()); }

}  // namespace

RecordedGroup::WorkPtr RecordedGroup::record(
    Lane lane, const CollectiveCall& call, c10::function_ref<WorkPtr()> start) {
  check_in_use();
  if (getSize() == 1) return start();
  // Added before the start, which may run callbacks that start other collectives.
  const auto number = calls_->add(lane, call);
  try {
    return start();
  } catch (...) {
    calls_->remove_latest(lane, number);
    throw;
  }
}

RecordedGroup::WorkPtr RecordedGroup::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto call = describe_call(Kind::kBroadcast, tensors, -1, options.rootRank);
  return record(lane_of(tensors), call, [&] { return Base::broadcast(tensors, options); });
}

RecordedGroup::WorkPtr RecordedGroup::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto call = describe_call(Kind::kAllReduce, tensors, options.reduceOp.op_);
  return record(lane_of(tensors), call, [&] { return Base::allreduce(tensors, options); });
}

RecordedGroup::WorkPtr RecordedGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const auto call = describe_call(Kind::kAllReduce, tensors, options.reduceOp.op_);
  return record(
      lane_of(tensors), call, [&] { return Base::allreduce_coalesced(tensors, options); });
}

RecordedGroup::WorkPtr RecordedGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto call = describe_call(Kind::kReduce, tensors, options.reduceOp.op_, options.rootRank);
  return record(lane_of(tensors), call, [&] { return Base::reduce(tensors, options); });
}

RecordedGroup::WorkPtr RecordedGroup::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto call = describe_lists(Kind::kAllGather, outputs);
  return record(lane_of(inputs), call, [&] { return Base::allgather(outputs, inputs, options); });
}

RecordedGroup::WorkPtr RecordedGroup::DDP_GROUP_ALL_GATHER_SINGLE(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  const auto call = describe_call(Kind::kAllGather, output);
  return record(lane_of(input), call, [&] {
    return Base::DDP_GROUP_ALL_GATHER_SINGLE(output, input, options);
  });
}

RecordedGroup::WorkPtr RecordedGroup::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto call = describe_call(Kind::kGather, inputs, -1, options.rootRank);
  return record(lane_of(inputs), call, [&] { return Base::gather(outputs, inputs, options); });
}

RecordedGroup::WorkPtr RecordedGroup::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const auto call = describe_call(Kind::kScatter, outputs, -1, options.rootRank);
  return record(lane_of(outputs), call, [&] { return Base::scatter(outputs, inputs, options); });
}

RecordedGroup::WorkPtr RecordedGroup::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const auto call = describe_lists(Kind::kReduceScatter, inputs, options.reduceOp.op_);
  return record(
      lane_of(outputs), call, [&] { return Base::reduce_scatter(outputs, inputs, options); });
}

RecordedGroup::WorkPtr RecordedGroup::DDP_GROUP_REDUCE_SCATTER_SINGLE(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const auto call = describe_call(Kind::kReduceScatter, input, options.reduceOp.op_);
  return record(lane_of(input), call, [&] {
    return Base::DDP_GROUP_REDUCE_SCATTER_SINGLE(output, input, options);
  });
}

RecordedGroup::WorkPtr RecordedGroup::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto call = describe_call(Kind::kAllToAll, inputs);
  return record(lane_of(inputs), call, [&] { return Base::alltoall(outputs, inputs, options); });
}

RecordedGroup::WorkPtr RecordedGroup::send(Tensors& tensors, int dst, int tag) {
  check_in_use();
  return Base::send(tensors, dst, tag);
}

RecordedGroup::WorkPtr RecordedGroup::recv(Tensors& tensors, int src, int tag) {
  check_in_use();
  return Base::recv(tensors, src, tag);
}

RecordedGroup::WorkPtr RecordedGroup::recvAnysource(Tensors& tensors, int tag) {
  check_in_use();
  return Base::recvAnysource(tensors, tag);
}

c10::intrusive_ptr<c10d::Work> start_recorded(
    c10d::ProcessGroup& group, c10::Device device, const CollectiveCall& call,
    c10::function_ref<c10::intrusive_ptr<c10d::Work>()> start) {
  auto* recorded = dynamic_cast<RecordedGroup*>(&group);
  return recorded ? recorded->record(CallHistory::lane_of(device.type()), call, start) : start();
}

}  // namespace ddp
