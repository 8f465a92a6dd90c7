#include "pipeline/messages/wire.h"

#include <ATen/ATen.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

/// Passes one byte from rank to rank along the route, which is no ring.
void connect_along(
    const MessageRoute& route, const ProcessGroup& group, GroupMonitor& monitor,
    c10::Device device) {
  const int ranks = group->getSize(), rank = group->getRank();
  const int step = route.kind == 'F' ? 1 : ranks - 1;
  const int next = (rank + step) % ranks, previous = (rank + ranks - step) % ranks;
  const auto is_on_route = [&](int sender, int receiver) {
    return route_of(route.kind, sender, receiver).goes_up == route.goes_up;
  };
  const auto wait = [&](const c10::intrusive_ptr<c10d::Work>& work) {
    monitor.wait(
        *work, [] { return std::string("connecting the stages of a pipeline"); }, Peers::Some);
  };
  std::vector<at::Tensor> byte{at::zeros({1}, at::device(device).dtype(at::kByte))};
  if (is_on_route(previous, rank)) wait(group->recv(byte, previous, 0));
  if (is_on_route(rank, next)) wait(group->send(byte, next, 0));
}

}  // namespace

bool has_streams(c10d::ProcessGroup& group, c10::Device device) {
  return any_of(group.getDeviceTypes(), [&](c10::Device one) {
    return one.type() == device.type() && capabilities_of(group, device).waits_on_stream;
  });
}

MessageGroups::MessageGroups(
    const ProcessGroup& group, GroupMonitor& monitor, const std::vector<MessageRoute>& routes,
    c10::Device device)
    : are_on_streams_(true) {
  const auto ranks = numbers_up_to(group->getSize());
  for (const auto& route : routes) {
    const auto made = new_group(ranks, group);
    connect_along(route, made, monitor, device);
    groups_.emplace(route, made);
  }
}

const ProcessGroup& MessageGroups::of(const MessageRoute& route, const ProcessGroup& own) const {
  return groups_.empty() ? own : groups_.at(route);
}

bool StageWire::has_threads() const {
  return device.is_cpu() && header_device.is_cpu() && !groups.are_on_streams();
}

c10::intrusive_ptr<c10d::Work> StageWire::send(
    const at::Tensor& bytes, char kind, const PipelineMessage& to) const {
  std::vector<at::Tensor> tensors{bytes};
  const auto& carrier = groups.of(route_of(kind, group->getRank(), to.peer), group);
  return carrier->send(tensors, static_cast<int>(to.peer), static_cast<int>(to.tag));
}

c10::intrusive_ptr<c10d::Work> StageWire::receive(
    const at::Tensor& bytes, char kind, const PipelineMessage& from) const {
  std::vector<at::Tensor> tensors{bytes};
  const auto& carrier = groups.of(route_of(kind, from.peer, group->getRank()), group);
  return carrier->recv(tensors, static_cast<int>(from.peer), static_cast<int>(from.tag));
}

}  // namespace ddp
