#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "../progress/progress_engine.h"

namespace ddp::backends::shm {

/// The engines that a collective goes through, one after the other; stored without an allocation.
using Engines = c10::SmallVector<std::shared_ptr<ProgressEngine>, 2>;

/// Completes the future of a handle. Logs what callbacks on it throw.
void complete_future(
    c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
    const std::exception_ptr& error) noexcept;

/// The handle of a collective over shared memory. Every thread that waits on it or polls it makes
/// progress in the collective's engines.
class ShmWork : public c10d::Work {
 public:
  /// \param title  for profiles and messages, such as "shm:all_reduce".
  /// \param outputs  the tensors that result() and the future return.
  ShmWork(
      Engines engines, int rank, c10d::OpType type, const char* title,
      std::vector<at::Tensor> outputs);

  /// Starts the call in the only engine. The call's completion completes this handle.
  ///
  /// \throws c10::DistBackendError  as ProgressEngine::start.
  void start(Call call);

  /// Completes the handle. To be called once. Exceptions of callbacks on the future are logged.
  void complete(const std::exception_ptr& error) noexcept;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_.value_or(0); }

 private:
  void wait_in_engine(std::chrono::milliseconds timeout);
  void wait_for_completion(std::chrono::milliseconds timeout);

  const Engines engines_;
  const char* const title_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<uint64_t> number_;  // in the only engine, after start()
  bool counts_future_ = false;      // guarded by the base class's mutex_
};

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
