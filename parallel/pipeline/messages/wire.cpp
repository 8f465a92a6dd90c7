#include "pipeline/messages/wire.h"

namespace ddp {

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
