#include <ddp/collectives.h>

#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/pretended.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/arguments.h"
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

WorkPtr start_message(const P2POp& op, std::vector<at::Tensor>& tensors, c10d::Backend& backend) {
  return op.kind() == P2POp::Kind::Send ? backend.send(tensors, op.peer(), op.tag())
                                        : backend.recv(tensors, op.peer(), op.tag());
}

// All messages as one: NCCL has one stream for two ranks, where a send waits for its recv.
WorkPtr start_coalesced(
    const std::vector<P2POp>& ops, const std::vector<WireTensor>& wires, MonitoredGroup* own,
    c10d::Backend& backend) {
  if (own) own->check_in_use();
  backend.startCoalescing();
  std::vector<uint64_t> logged;
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<at::Tensor> tensors{wires[i].wire};
    const bool sends = ops[i].kind() == P2POp::Kind::Send;
    if (own)
      logged.push_back(
          own->log_call(sends ? "send" : "recv", tensors, ops[i].peer(), ops[i].tag()));
    start_message(ops[i], tensors, backend);
  }
  auto work = backend.endCoalescing();
  // A wait for the last one is a wait for all of them.
  if (!logged.empty() && logged.back() > 0) {
    CallLog::active()->set_handle(work.get(), logged.back());
  }
  return own ? own->watched_message(std::move(work), {wires.front().wire}) : work;
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

WorkPtr recv_async(at::Tensor& tensor, std::optional<int> src, int tag, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("recv", tensor, *group);
  src ? check_peer("recv", "src", *src, tag, *group) : check_any_source(tensor, tag, *group);
  const auto wire = message_wire_of(tensor, *group);
  std::vector<at::Tensor> tensors{wire.wire};
  return monitored_message(false, src, tag, *group, tensor.device(), [&] {
    return copying_out(
        {{src ? group->recv(tensors, *src, tag) : group->recvAnysource(tensors, tag)}}, {wire});
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

int recv(at::Tensor& tensor, std::optional<int> src, int tag, const GroupArg& group) {
  const auto work = recv_async(tensor, src, tag, group);
  work->wait();
  return src ? *src : work->sourceRank();
}

void barrier(const GroupArg& group) { barrier_async(group)->wait(); }

void monitored_barrier(std::chrono::milliseconds timeout, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  DDP_CHECK_VALUE(
      timeout.count() > 0, "monitored_barrier: expected a timeout of more than 0 ms, got ",
      timeout.count(), " ms ", on_rank_text(*group), ". Give what the slowest rank may take.");
  if (auto* own = dynamic_cast<MonitoredGroup*>(group.get())) own->check_in_use();
  if (is_pretended()) return;
  const auto store = group->getStore();
  DDP_CHECK(
      store, "monitored_barrier: expected a group with a store, got one without ",
      on_rank_text(*group),
      ". Use one that init_process_group, make_process_group or new_group made.");
  run_startup_barrier(
      {c10::make_intrusive<c10d::PrefixStore>("monitored_barrier", store), group->getRank(),
       group->getSize(), Deadline(timeout), "monitored_barrier"});
}

std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& ops, const GroupArg& group) {
  return start_messages(ops, group.get(), {});
}

std::vector<WorkPtr> start_messages(
    const std::vector<P2POp>& ops, const ProcessGroup& group,
    const std::function<std::string()>& where) {
  const auto name = [](const P2POp& op) {
    return op.kind() == P2POp::Kind::Send ? "send" : "recv";
  };
  DDP_CHECK_VALUE(
      !ops.empty(), "batch_isend_irecv: expected at least one message, got none ",
      on_rank_text(*group), ". Skip the call on a rank without messages.");
  std::vector<WireTensor> wires, sent, received;
  for (const auto& op : ops) {
    check_tensor(name(op), op.tensor(), *group);
    check_peer(
        name(op), op.kind() == P2POp::Kind::Send ? "dst" : "src", op.peer(), op.tag(), *group);
    DDP_CHECK_VALUE(
        op.tensor().device().type() == ops.front().tensor().device().type(),
        "batch_isend_irecv: expected tensors on one kind of device, got ", op.tensor().device(),
        " and ", ops.front().tensor().device(), " ", on_rank_text(*group),
        ". Make one batch for each.");
    wires.push_back(message_wire_of(op.tensor(), *group));
    (op.kind() == P2POp::Kind::Recv ? received : sent).push_back(wires.back());
  }
  const auto device = ops.front().tensor().device();
  const auto backend = group->getBackend(device.type());
  if (backend->supportsCoalescing()) {
    auto* own = dynamic_cast<MonitoredGroup*>(group.get());
    const auto start = [&] {
      return copying_out({{start_coalesced(ops, wires, own, *backend)}}, received, sent);
    };
    const auto batch = [] { return std::string("batch_isend_irecv"); };
    return {monitored(where ? where : batch, *group, device, start, Peers::Some)};
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<at::Tensor> tensors{wires[i].wire};
    const auto& op = ops[i];
    const auto start = [&]() -> StartedCall {
      if (op.kind() == P2POp::Kind::Send) {
        return copying_out({{group->send(tensors, op.peer(), op.tag())}}, {}, {wires[i]});
      }
      return copying_out({{group->recv(tensors, op.peer(), op.tag())}}, {wires[i]});
    };
    if (where) {
      works.push_back(monitored(where, *group, device, start, Peers::Some));
      continue;
    }
    const bool sends = op.kind() == P2POp::Kind::Send;
    works.push_back(monitored_message(sends, op.peer(), op.tag(), *group, device, start));
  }
  return works;
}

}  // namespace ddp
