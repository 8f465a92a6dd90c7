#include "pipeline/messages/wire.h"

namespace ddp {

bool StageWire::has_threads() const { return device.is_cpu() && header_device.is_cpu(); }

c10::intrusive_ptr<c10d::Work> StageWire::send(
    const at::Tensor& bytes, const PipelineMessage& to) const {
  std::vector<at::Tensor> tensors{bytes};
  return group->send(tensors, static_cast<int>(to.peer), static_cast<int>(to.tag));
}

c10::intrusive_ptr<c10d::Work> StageWire::receive(
    const at::Tensor& bytes, const PipelineMessage& from) const {
  std::vector<at::Tensor> tensors{bytes};
  return group->recv(tensors, static_cast<int>(from.peer), static_cast<int>(from.tag));
}

}  // namespace ddp
