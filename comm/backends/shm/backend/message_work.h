#pragma once

#include <atomic>
#include <exception>
#include <memory>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "../progress/progress_engine.h"

namespace ddp::backends::shm {

/// The handle of a message over shared memory. A thread that waits on it or polls it makes
/// progress. A message goes on if its handle is dropped, or a wait() with a limit throws.
class MessageWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// \param peer  a rank of the host; Message::kAny for a message of any of them.
  /// \throws c10::DistBackendError  after the engine aborted.
  static WorkPtr send(
      std::shared_ptr<ProgressEngine> engine, const at::Tensor& tensor, int peer, int tag);
  static WorkPtr receive(
      std::shared_ptr<ProgressEngine> engine, const at::Tensor& tensor, int peer, int tag);

  MessageWork(std::shared_ptr<ProgressEngine> engine, c10d::OpType type, int peer, int tag);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { engine_->fail(kGroupAborted); }
  int sourceRank() const override { return engine_->rank_at(source_); }

 private:
  Message message(const at::Tensor& tensor);
  void end(const std::exception_ptr& error, int source) noexcept;

  const std::shared_ptr<ProgressEngine> engine_;
  const int peer_;
  const int tag_;
  std::atomic<int> source_;  // of a message of any rank: after its end
  std::atomic<bool> has_ended_{false};
};

}  // namespace ddp::backends::shm
