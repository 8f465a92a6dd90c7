// Several sends and recvs at a time.
#include <ddp/collectives.h>

#include <ddp/internal/check.h>

#include "collectives/collective_checks.h"
#include "collectives/wire.h"
#include "group/monitored_call.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

WorkPtr start_message(const P2POp& op, std::vector<at::Tensor>& tensors, c10d::Backend& backend) {
  return op.kind() == P2POp::Kind::Send ? backend.send(tensors, op.peer(), op.tag())
                                        : backend.recv(tensors, op.peer(), op.tag());
}

// All messages as one: NCCL has one stream for two ranks, where a send waits for its recv.
WorkPtr start_coalesced(
    const std::vector<P2POp>& ops, const std::vector<Wire>& wires, MonitoredGroup* own,
    c10d::Backend& backend) {
  if (own) own->check_in_use();
  backend.startCoalescing();
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<at::Tensor> tensors{wires[i].wire};
    start_message(ops[i], tensors, backend);
  }
  auto work = backend.endCoalescing();
  return own ? own->watched_message(std::move(work), {wires.front().wire}) : work;
}

}  // namespace

std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& ops, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  const auto name = [](const P2POp& op) {
    return op.kind() == P2POp::Kind::Send ? "send" : "recv";
  };
  DDP_CHECK_VALUE(
      !ops.empty(), "batch_isend_irecv: expected at least one message, got none ",
      on_rank_text(*group), ". Skip the call on a rank without messages.");
  std::vector<Wire> wires, sent, received;
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
    return {monitored("batch_isend_irecv", *group, device, start, Peers::Some)};
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
    const bool sends = op.kind() == P2POp::Kind::Send;
    works.push_back(monitored_message(sends, op.peer(), op.tag(), *group, device, start));
  }
  return works;
}

}  // namespace ddp
