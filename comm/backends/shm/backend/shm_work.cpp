#include "shm_work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/check.h>

#include "base/deadline.h"

namespace ddp::backends::shm {

// The progress threads complete collectives of several engines. A waiting thread makes progress
// this often, in case the progress threads are in callbacks that wait.
constexpr std::chrono::milliseconds kPoll{20};

void complete_future(
    c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
    const std::exception_ptr& error) noexcept {
  try {
    error ? future.setError(error) : future.markCompleted(c10::IValue(outputs));
  } catch (...) {
    warn_callback_threw();
  }
}

ShmWork::ShmWork(
    Engines engines, int rank, c10d::OpType type, const char* title,
    std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, outputs),
      engines_(std::move(engines)),
      title_(title),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

void ShmWork::start(Call call) {
  auto self = c10::intrusive_ptr<ShmWork>::unsafe_reclaim_from_nonowning(this);
  call.on_complete = [self](const std::exception_ptr& error) { self->complete(error); };
  number_ = engines_.front()->start(std::move(call));
}

void ShmWork::complete(const std::exception_ptr& error) noexcept {
  finish(error);
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(counts_future_, false)) {
      for (const auto& engine : engines_) engine->count_future(-1);
    }
  }
  complete_future(*future_, outputs_, error);
}

bool ShmWork::isCompleted() {
  if (!Work::isCompleted()) {
    for (const auto& engine : engines_) engine->progress();
  }
  return Work::isCompleted();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!Work::isCompleted()) number_ ? wait_in_engine(timeout) : wait_for_completion(timeout);
  return Work::wait(timeout);  // the thread that completes the collective may still be at it
}

void ShmWork::wait_in_engine(std::chrono::milliseconds timeout) {
  // Without a limit here, the group's timeout fails the collective.
  const auto at_most = timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout;
  DDP_CHECK_WITH(
      DistBackendError, engines_.front()->wait(*number_, at_most), title_, " (collective number ",
      *number_, ") is not over after the ", timeout.count(), " ms that wait() was given.");
}

void ShmWork::wait_for_completion(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  std::unique_lock lock(mutex_);
  while (!completed_) {
    auto patience = kPoll;
    if (timeout != kNoTimeout) {
      DDP_CHECK_WITH(
          DistBackendError, !deadline.passed(), title_, " is not over after the ", timeout.count(),
          " ms that wait() was given.");
      patience = std::min(patience, deadline.left());
    }
    if (cv_.wait_for(lock, patience, [this] { return completed_; })) return;
    lock.unlock();
    for (const auto& engine : engines_) engine->poll();
    lock.lock();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!completed_ && !std::exchange(counts_future_, true)) {
    for (const auto& engine : engines_) engine->count_future(1);
  }
  return future_;
}

void ShmWork::abort() {
  for (const auto& engine : engines_) engine->fail(kGroupAborted);
}

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
