#include "pipeline/messages/wire.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/collectives.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

/// Passes one byte to each neighbor and gets one from it, all in one batch. The messages of both
/// directions are in one order on all ranks, for backends that move one after the other.
void connect_neighbors(
    const ProcessGroup& group, GroupMonitor& monitor, const PipelineShape& shape,
    c10::Device device) {
  const int ranks = group->getSize(), rank = group->getRank();
  const auto options = at::device(device).dtype(at::kByte);
  std::vector<P2POp> ops;
  for (const int step : {1, ranks - 1}) {
    for (int sender = 0; sender < ranks; ++sender) {
      const int receiver = (sender + step) % ranks;
      const bool goes_around = step == 1 ? receiver == 0 : sender == 0;
      if (goes_around && shape.chunks == 1) continue;
      if (sender == rank) ops.push_back(P2POp::send(at::zeros({1}, options), receiver));
      if (receiver == rank) ops.push_back(P2POp::recv(at::empty({1}, options), sender));
    }
  }
  const auto where = [] { return std::string("connecting the stages of a pipeline"); };
  for (const auto& work : start_messages(ops, group, where)) {
    monitor.wait(*work, where, Peers::Some);
  }
}

bool hosts_talk(c10d::ProcessGroup& group) {
  return carrier_device(group).is_cpu() && !has_streams(group, at::kCPU);
}

}  // namespace

bool has_streams(c10d::ProcessGroup& group, c10::Device device) {
  return any_of(group.getDeviceTypes(), [&](c10::Device one) {
    return one.type() == device.type() && capabilities_of(group, device).waits_on_stream;
  });
}

c10::Device stream_device(c10d::ProcessGroup& group, c10::Device own) {
  if (has_streams(group, own)) return own;
  for (const auto& device : group.getDeviceTypes()) {
    if (!has_streams(group, device)) continue;
    return device.is_cpu() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  return own;
}

MessageGroups::MessageGroups(
    const ProcessGroup& group, GroupMonitor& monitor, const PipelineShape& shape,
    c10::Device device)
    : are_on_streams_(shape.ranks > 1) {
  if (!are_on_streams_) return;
  hosts_ = hosts_talk(*group) ? group : new_host_group(group);
  connect_neighbors(group, monitor, shape, device);
}

bool StageWire::has_threads() const { return device.is_cpu() && header_device.is_cpu(); }

int64_t StageWire::stage_of(const PipelineAction& action) const {
  return shape.stage_of(group->getRank(), action.chunk);
}

int64_t StageWire::stage_before(const PipelineAction& action) const {
  return stage_of(action) + (action.kind == 'F' ? -1 : 1);
}

c10::intrusive_ptr<c10d::Work> StageWire::send(
    const at::Tensor& bytes, const PipelineMessage& to) const {
  std::vector<at::Tensor> tensors{bytes};
  const auto& carrier = groups.are_on_streams() ? groups.hosts() : group;
  return carrier->send(tensors, static_cast<int>(to.peer), static_cast<int>(to.tag));
}

c10::intrusive_ptr<c10d::Work> StageWire::receive(
    const at::Tensor& bytes, const PipelineMessage& from) const {
  std::vector<at::Tensor> tensors{bytes};
  const auto& carrier = groups.are_on_streams() ? groups.hosts() : group;
  return carrier->recv(tensors, static_cast<int>(from.peer), static_cast<int>(from.tag));
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
}

at::Tensor bytes_of(const int64_t* words, int64_t count, at::Device device) {
  auto tensor = at::empty({count}, at::kLong);
  std::copy(words, words + count, tensor.data_ptr<int64_t>());
  return tensor.to(device).view(at::kByte);
}

std::vector<at::Tensor> parts_of(const StageMessageHeader& header, at::Device device) {
  const auto words = words_of(header);
  std::vector<at::Tensor> parts{bytes_of(words.data(), kHeaderWords, device)};
  const auto rest = static_cast<int64_t>(words.size()) - kHeaderWords;
  if (rest > 0) parts.push_back(bytes_of(words.data() + kHeaderWords, rest, device));
  return parts;
}

void append_words(const at::Tensor& bytes, std::vector<int64_t>& words) {
  const auto received = bytes.cpu().view(at::kLong);
  const auto* first = received.const_data_ptr<int64_t>();
  words.insert(words.end(), first, first + received.numel());
}

}  // namespace ddp
