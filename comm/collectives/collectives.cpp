#include <ddp/collectives.h>

#include <algorithm>

#include <ddp/internal/check.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/collective_checks.h"
#include "collectives/wire.h"
#include "group/monitored_call.h"
#include "group/monitored_group.h"
#include "store/startup_barrier.h"

namespace ddp {
namespace {

WorkPtr start_barrier(c10d::ProcessGroup& group) {
  const auto device = barrier_device(group);
  c10d::BarrierOptions options;
  options.device = device;
  if (!device.is_cpu()) options.device_ids = {device.index()};
  const auto start = [&] {
    // Not by another class of groups: c10d::ProcessGroup makes a tensor in a static variable, which
    // is a data race for ranks that are threads of one process.
    const bool is_own = own_monitor_of(group) != nullptr;
    return StartedCall{
        {is_own ? group.barrier(options) : group.getBackend(device.type())->barrier(options)}};
  };
  // NCCL's wait for a barrier synchronizes with the stream, for as long as a rank is missing.
  return monitored("barrier", group, device, start, Peers::All, WaitOn::Host);
}

}  // namespace

WorkPtr all_reduce_async(at::Tensor& tensor, c10d::ReduceOp op, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("all_reduce", tensor, *group);
  const auto reduction = wire_reduction("all_reduce", op, tensor, *group);
  const auto wire = reduction_wire_of(tensor, reduction);
  std::vector<at::Tensor> tensors{wire.wire};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction.op;
  return monitored("all_reduce", *group, tensor.device(), [&] {
    return copying_out({{group->allreduce(tensors, options)}}, {wire}, {}, reduction.divisor);
  });
}

WorkPtr broadcast_async(at::Tensor& tensor, int src, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("broadcast", tensor, *group);
  check_rank("broadcast", "src", src, *group);
  const auto wire = wire_of(tensor);
  std::vector<at::Tensor> tensors{wire.wire};
  c10d::BroadcastOptions options;
  options.rootRank = src;
  return monitored(
      "broadcast", *group, tensor.device(),
      [&] { return copying_out({{group->broadcast(tensors, options)}}, {wire}); }, Peers::Some);
}

WorkPtr reduce_async(at::Tensor& tensor, int dst, c10d::ReduceOp op, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("reduce", tensor, *group);
  check_rank("reduce", "dst", dst, *group);
  const auto reduction = wire_reduction("reduce", op, tensor, *group);
  const auto wire = reduction_wire_of(tensor, reduction);
  std::vector<at::Tensor> tensors{wire.wire};
  c10d::ReduceOptions options;
  options.reduceOp = reduction.op;
  options.rootRank = dst;
  return monitored(
      "reduce", *group, tensor.device(),
      [&] {
        return copying_out({{group->reduce(tensors, options)}}, {wire}, {}, reduction.divisor);
      },
      Peers::Some);
}

WorkPtr send_async(const at::Tensor& tensor, int dst, int tag, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("send", tensor, *group);
  check_peer("send", "dst", dst, tag, *group);
  const auto wire = message_wire_of(tensor, *group);
  std::vector<at::Tensor> tensors{wire.wire};
  return monitored_message(true, dst, tag, *group, tensor.device(), [&] {
    return copying_out({{group->send(tensors, dst, tag)}}, {}, {wire});
  });
}

WorkPtr recv_async(at::Tensor& tensor, int src, int tag, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("recv", tensor, *group);
  check_peer("recv", "src", src, tag, *group);
  const auto wire = message_wire_of(tensor, *group);
  std::vector<at::Tensor> tensors{wire.wire};
  return monitored_message(false, src, tag, *group, tensor.device(), [&] {
    return copying_out({{group->recv(tensors, src, tag)}}, {wire});
  });
}

WorkPtr barrier_async(const GroupArg& group_arg) { return start_barrier(*group_arg.get()); }

void all_reduce(at::Tensor& tensor, c10d::ReduceOp op, const GroupArg& group) {
  all_reduce_async(tensor, op, group)->wait();
}

at::Tensor all_reduce(at::Tensor&& tensor, c10d::ReduceOp op, const GroupArg& group) {
  all_reduce(tensor, op, group);
  return tensor.detach();
}

void broadcast(at::Tensor& tensor, int src, const GroupArg& group) {
  broadcast_async(tensor, src, group)->wait();
}

void reduce(at::Tensor& tensor, int dst, c10d::ReduceOp op, const GroupArg& group) {
  reduce_async(tensor, dst, op, group)->wait();
}

void send(const at::Tensor& tensor, int dst, int tag, const GroupArg& group) {
  send_async(tensor, dst, tag, group)->wait();
}

void recv(at::Tensor& tensor, int src, int tag, const GroupArg& group) {
  recv_async(tensor, src, tag, group)->wait();
}

void barrier(const GroupArg& group) { barrier_async(group)->wait(); }

void monitored_barrier(std::chrono::milliseconds timeout, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  DDP_CHECK_VALUE(
      timeout.count() > 0, "monitored_barrier: expected a timeout of more than 0 ms, got ",
      timeout.count(), " ms ", on_rank_text(*group), ". Give what the slowest rank may take.");
  if (auto* own = dynamic_cast<MonitoredGroup*>(group.get())) own->check_in_use();
  const auto store = group->getStore();
  DDP_CHECK(
      store, "monitored_barrier: expected a group with a store, got one without ",
      on_rank_text(*group),
      ". Use one that init_process_group, make_process_group or new_group made.");
  run_startup_barrier(
      {c10::make_intrusive<c10d::PrefixStore>("monitored_barrier", store), group->getRank(),
       group->getSize(), Deadline(timeout), "monitored_barrier"});
}

}  // namespace ddp
