#include "pipeline/messages/outbox.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/text.h>

#include "pipeline/messages/message_header.h"

namespace ddp {
void StageOutbox::start(Sent& sent, const at::Tensor& bytes) const {
  sent.works.push_back(wire_.send(bytes, sent.message));
  sent.memory.push_back(bytes);
}

void StageOutbox::send(
    const PipelineAction& action, const PipelineMessage& message, int64_t stage,
    const std::vector<at::Tensor>& tensors, bool is_filler) {
  StageMessageHeader header{action.kind, stage, action.microbatch, is_filler, wire_.call};
  for (const auto& tensor : tensors) header.tensors.push_back(description_of(tensor));
  Sent sent{action, message, stage};
  for (const auto& part : parts_of(header, wire_.header_device)) start(sent, part);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (has_bytes(header.tensors[i])) start(sent, bytes_of(tensors[i]));
  }
  if (!wire_.has_threads()) {
    drop_arrived();
    sent_.push_back(std::move(sent));
    return;
  }
  dropper_.change([&] { sent_.push_back(std::move(sent)); });
  if (!dropper_.has_started()) dropper_.start([this] { drop_all(); });
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
void StageOutbox::drop_all() {
  Sent* first = nullptr;  // stays where it is while send() appends others
  const auto has_first = [&] {
    first = sent_.empty() ? nullptr : &sent_.front();
    return first != nullptr;
  };
  while (dropper_.wait_until(has_first)) {
    for (const auto& work : first->works) dropper_.wait_for(work);
    // The action stays, for finish(), which may look at it now.
    first->works.clear();
    first->memory.clear();
    dropper_.change([&] {
      sent_.pop_front();
      ++arrived_;
    });
  }
}

std::string StageOutbox::text_of_first() {
  const auto locked = dropper_.lock();
  if (sent_.empty()) return "sending to another stage";
  const auto& first = sent_.front();
  return ddp::str(
      action_text(first.action.kind, first.action.microbatch, first.stage), ", sending to ",
      wire_.name_of(first.message.peer));
}

void StageOutbox::wait_for(size_t count) {
  const auto sending = [&] { return text_of_first(); };
  if (dropper_.has_started()) return dropper_.wait([&] { return arrived_ >= count; }, sending);
  for (; arrived_ < count; ++arrived_) {
    for (const auto& work : sent_.front().works) wire_.monitor->wait(*work, sending, Peers::Some);
    sent_.pop_front();
  }
}

void StageOutbox::finish(const PipelineAction& action) {
  auto locked = dropper_.lock();
  const auto found = std::find_if(sent_.begin(), sent_.end(), [&](const Sent& sent) {
    return sent.action.kind == action.kind && sent.action.chunk == action.chunk &&
           sent.action.microbatch == action.microbatch;
  });
  if (found == sent_.end()) return;
  const auto count = arrived_ + static_cast<size_t>(found - sent_.begin()) + 1;
  locked.unlock();
  wait_for(count);
}

void StageOutbox::finish_all() {
  auto locked = dropper_.lock();
  const auto count = arrived_ + sent_.size();
  locked.unlock();
  wait_for(count);
}

}  // namespace ddp
