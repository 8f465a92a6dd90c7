#include "message_work.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/check.h>

namespace ddp::backends::shm {

using c10d::OpType;

MessageWork::MessageWork(std::shared_ptr<ProgressEngine> engine, OpType type, int peer, int tag)
    : c10d::Work(-1, type),
      engine_(std::move(engine)),
      peer_(peer),
      tag_(tag),
      source_(std::max(peer, 0)) {}

MessageWork::WorkPtr MessageWork::send(
    std::shared_ptr<ProgressEngine> engine, const at::Tensor& tensor, int peer, int tag) {
  auto work = c10::make_intrusive<MessageWork>(std::move(engine), OpType::SEND, peer, tag);
  work->engine_->send(work->message(tensor));
  return work;
}

MessageWork::WorkPtr MessageWork::receive(
    std::shared_ptr<ProgressEngine> engine, const at::Tensor& tensor, int peer, int tag) {
  const auto type = peer == Message::kAny ? OpType::RECVANYSOURCE : OpType::RECV;
  auto work = c10::make_intrusive<MessageWork>(std::move(engine), type, peer, tag);
  work->engine_->receive(work->message(tensor));
  return work;
}

Message MessageWork::message(const at::Tensor& tensor) {
  auto self = c10::intrusive_ptr<MessageWork>::unsafe_reclaim_from_nonowning(this);
  Message message;
  message.peer = peer_;
  message.tag = tag_;
  message.tensor = tensor;
  message.timeout = engine_->timeout();
  message.on_end = [self](const std::exception_ptr& error, int source) {
    self->end(error, source);
  };
  return message;
}

void MessageWork::end(const std::exception_ptr& error, int source) noexcept {
  if (peer_ == Message::kAny) source_ = source;
  finish(error);
  has_ended_ = true;
}

bool MessageWork::isCompleted() {
  if (!has_ended_) engine_->progress();
  return has_ended_;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  // Without a limit here, the group's timeout fails the message.
  const auto at_most = timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout;
  DDP_CHECK_WITH(
      DistBackendError, engine_->wait_for_message([this] { return has_ended_.load(); }, at_most),
      "shm: ", retrieveOpType() == OpType::SEND ? "send" : "recv", " with tag ", tag_,
      " timed out after the ", timeout.count(), " ms that wait() was given.");
  return Work::wait(timeout);
}

}  // namespace ddp::backends::shm
