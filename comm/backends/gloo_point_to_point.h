#pragma once

#include <chrono>
#include <thread>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::backends {

/// A send or receive of Gloo's that can be polled.
///
/// Gloo's own work completes in its wait() alone, so that a loop over isCompleted() would never
/// end. Here the first isCompleted() starts a thread that waits. The destructor aborts a transfer
/// that the thread still waits for. A wait() without an isCompleted() before it costs no thread.
class GlooPointToPoint : public c10d::Work {
 public:
  /// \param timeout  for a wait() that is given none.
  GlooPointToPoint(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds timeout);
  ~GlooPointToPoint() override;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override;

 private:
  /// Whether this is the first call, whose caller has to finish the transfer.
  bool claim();
  void finish_transfer(std::chrono::milliseconds timeout);

  const OwnerProcess owner_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::chrono::milliseconds timeout_;
  bool claimed_ = false;  // guarded by mutex_
  bool arrived_ = false;  // written before the base class is completed, read after
  std::thread waiter_;
};

}  // namespace ddp::backends
