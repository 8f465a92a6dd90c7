#include "pipeline/outbox.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/carrier_device.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "pipeline/message_header.h"

namespace ddp {
namespace {

at::Tensor bytes_of_tensor(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
}

at::Tensor tensor_of_words(const int64_t* words, int64_t count, at::Device device) {
  auto tensor = at::empty({count}, at::kLong);
  std::copy(words, words + count, tensor.data_ptr<int64_t>());
  return tensor.to(device).view(at::kByte);
}

}  // namespace

StageOutbox::StageOutbox(
    const ProcessGroup& group, const std::shared_ptr<GroupMonitor>& monitor, at::Device device)
    : group_(group), monitor_(monitor), device_(device), header_device_(carrier_device(*group)) {}

StageOutbox::~StageOutbox() {
  if (!dropper_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  wait_.end();
  dropper_.join();
}

void StageOutbox::start(Sent& sent, const at::Tensor& bytes, int64_t tag) const {
  std::vector<at::Tensor> tensors{bytes};
  sent.works.push_back(group_->send(tensors, static_cast<int>(sent.peer), static_cast<int>(tag)));
  sent.memory.push_back(bytes);
}

void StageOutbox::send(
    const Action& action, const PipelineMessage& message, int64_t stage,
    const std::vector<at::Tensor>& tensors) {
  StageMessageHeader header{action.kind, stage, action.microbatch};
  for (const auto& tensor : tensors) header.tensors.push_back(description_of(tensor));
  const auto words = words_of(header);
  Sent sent{action, message.peer, stage};
  start(sent, tensor_of_words(words.data(), kHeaderWords, header_device_), message.tag);
  const auto rest = static_cast<int64_t>(words.size()) - kHeaderWords;
  if (rest > 0) {
    start(sent, tensor_of_words(words.data() + kHeaderWords, rest, header_device_), message.tag);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (has_bytes(header.tensors[i])) start(sent, bytes_of_tensor(tensors[i]), message.tag);
  }
  if (!has_transfer_threads(device_, header_device_)) {
    drop_arrived();
    sent_.push_back(std::move(sent));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    sent_.push_back(std::move(sent));
  }
  if (!dropper_.joinable()) dropper_ = std::thread([this] { drop_all(); });
  changed_.notify_all();
}

/// Without a thread: drops what has arrived by now.
void StageOutbox::drop_arrived() {
  const auto is_complete = [](const auto& work) { return work->isCompleted(); };
  while (!sent_.empty()) {
    const auto& works = sent_.front().works;
    if (!std::all_of(works.begin(), works.end(), is_complete)) return;
    wait_for(arrived_ + 1);
  }
}

/// The thread: drops each message when it has arrived.
void StageOutbox::drop_all() noexcept {
  try {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return is_over_ || !sent_.empty(); });
      if (sent_.empty()) return;
      auto& first = sent_.front();  // send() appends others
      lock.unlock();
      for (const auto& work : first.works) wait_.wait(work);
      // The action stays, for finish(), which may look at it now.
      first.works.clear();
      first.memory.clear();
      lock.lock();
      sent_.pop_front();
      ++arrived_;
      lock.unlock();
      changed_.notify_all();
    }
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
    changed_.notify_all();
  }
}

void StageOutbox::wait_for(size_t count) {
  Action action{};
  int64_t peer = 0, stage = 0;
  const auto sending = [&] {
    return ddp::str(action_text(action.kind, action.microbatch, stage), ", sending to rank ", peer);
  };
  const auto look_at_first = [&] {
    if (sent_.empty()) return;
    action = sent_.front().action;
    peer = sent_.front().peer;
    stage = sent_.front().stage;
  };
  if (!dropper_.joinable()) {
    for (; arrived_ < count; ++arrived_) {
      look_at_first();
      for (const auto& work : sent_.front().works) monitor_->wait(*work, sending, Peers::Some);
      sent_.pop_front();
    }
    return;
  }
  const auto wait = [&](std::chrono::milliseconds at_most) {
    std::unique_lock lock(mutex_);
    const auto is_over = [&] { return arrived_ >= count || failure_; };
    if (changed_.wait_for(lock, at_most, is_over)) return true;
    look_at_first();
    return false;
  };
  wait_for_thread(*monitor_, group_, wait, sending);
  std::unique_lock lock(mutex_);
  if (arrived_ >= count) return;
  const auto failure = failure_;
  lock.unlock();
  monitor_->abort_on_error(sending, [&] { std::rethrow_exception(failure); });
}

void StageOutbox::finish(const Action& action) {
  std::unique_lock lock(mutex_);
  const auto found = std::find_if(sent_.begin(), sent_.end(), [&](const Sent& sent) {
    return sent.action.kind == action.kind && sent.action.chunk == action.chunk &&
           sent.action.microbatch == action.microbatch;
  });
  if (found == sent_.end()) return;
  const auto count = arrived_ + static_cast<size_t>(found - sent_.begin()) + 1;
  lock.unlock();
  wait_for(count);
}

void StageOutbox::finish_all() {
  std::unique_lock lock(mutex_);
  const auto count = arrived_ + sent_.size();
  lock.unlock();
  wait_for(count);
}

}  // namespace ddp
