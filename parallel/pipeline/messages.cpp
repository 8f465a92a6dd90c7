#include "pipeline/messages.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/carrier_device.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

at::Tensor bytes_of_tensor(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
}

bool has_bytes(const TensorDescription& tensor) {
  return tensor.is_defined &&
         std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) == tensor.sizes.end();
}

at::Tensor tensor_of_words(const int64_t* words, int64_t count, at::Device device) {
  auto tensor = at::empty({count}, at::kLong);
  std::copy(words, words + count, tensor.data_ptr<int64_t>());
  return tensor.to(device).view(at::kByte);
}

}  // namespace

StageMessages::StageMessages(
    const ProcessGroup& group, const std::shared_ptr<GroupMonitor>& monitor, at::Device device)
    : group_(group), monitor_(monitor), device_(device), header_device_(carrier_device(*group)) {}

void StageMessages::start(Sent& sent, const at::Tensor& bytes, int64_t tag) {
  std::vector<at::Tensor> tensors{bytes};
  sent.works.push_back(group_->send(tensors, static_cast<int>(sent.peer), static_cast<int>(tag)));
  sent.memory.push_back(bytes);
}

void StageMessages::send(
    const Action& action, const PipelineMessage& message, int64_t stage,
    const std::vector<at::Tensor>& tensors) {
  StageMessageHeader header{action.kind, stage, action.microbatch};
  for (const auto& tensor : tensors) header.tensors.push_back(description_of(tensor));
  const auto words = words_of(header);
  auto& sent = sent_.emplace_back(Sent{action, message.peer, stage, {}, {}});
  start(sent, tensor_of_words(words.data(), kHeaderWords, header_device_), message.tag);
  const auto rest = static_cast<int64_t>(words.size()) - kHeaderWords;
  if (rest > 0) {
    start(sent, tensor_of_words(words.data() + kHeaderWords, rest, header_device_), message.tag);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (has_bytes(header.tensors[i])) start(sent, bytes_of_tensor(tensors[i]), message.tag);
  }
}

void StageMessages::receive_into(
    at::Tensor& memory, const PipelineMessage& message, WaitPoint where) {
  std::vector<at::Tensor> tensors{memory};
  const auto work =
      group_->recv(tensors, static_cast<int>(message.peer), static_cast<int>(message.tag));
  monitor_->wait(*work, where, Peers::Some);
}

std::vector<int64_t> StageMessages::receive_words(
    int64_t count, const PipelineMessage& message, WaitPoint where) {
  auto bytes = at::empty(
      {count * static_cast<int64_t>(sizeof(int64_t))},
      at::TensorOptions(header_device_).dtype(at::kByte));
  receive_into(bytes, message, where);
  const auto words = bytes.cpu().view(at::kLong);
  return {words.data_ptr<int64_t>(), words.data_ptr<int64_t>() + count};
}

StageMessages::Received StageMessages::receive(
    const Action& action, const PipelineMessage& message, int64_t stage, WaitPoint where) {
  const auto from = [&] {
    return ddp::str(where(), ", from stage ", stage, " on rank ", message.peer);
  };
  auto words = receive_words(kHeaderWords, message, from);
  if (const auto rest = words_of_second_part(words); rest > 0) {
    const auto second = receive_words(rest, message, from);
    words.insert(words.end(), second.begin(), second.end());
  }
  Received received{header_of(words), {}};
  check_header(received.header, action.kind, stage, action.microbatch, on_rank_text(*group_));
  for (const auto& expected : received.header.tensors) {
    auto& tensor = received.tensors.emplace_back();
    if (!expected.is_defined) continue;
    tensor = at::empty(expected.sizes, at::TensorOptions(device_).dtype(expected.dtype));
    if (!has_bytes(expected)) continue;
    auto bytes = tensor.view({-1}).view(at::kByte);
    receive_into(bytes, message, from);
  }
  return received;
}

void StageMessages::wait(Sent& sent, WaitPoint where) {
  for (const auto& work : sent.works) {
    monitor_->wait(
        *work, [&] { return ddp::str(where(), ", sending to rank ", sent.peer); }, Peers::Some);
  }
}

void StageMessages::finish(const Action& action, WaitPoint where) {
  const auto is_of_action = [&](const Sent& sent) {
    return sent.action.kind == action.kind && sent.action.chunk == action.chunk &&
           sent.action.microbatch == action.microbatch;
  };
  const auto sent = std::find_if(sent_.begin(), sent_.end(), is_of_action);
  if (sent == sent_.end()) return;
  wait(*sent, where);
  sent_.erase(sent);
}

void StageMessages::finish_all() {
  for (auto& sent : sent_) {
    const auto where = [&] {
      return action_text(sent.action.kind, sent.action.microbatch, sent.stage);
    };
    wait(sent, where);
    sent.memory.clear();
  }
  sent_.clear();
}

}  // namespace ddp
