#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::backends {

/// A send or receive over Gloo that can be polled, made of one or two works of Gloo's.
///
/// Gloo's own work completes in its wait() only, so that a loop over isCompleted() would never end.
/// Here the first isCompleted() starts a thread that waits. The destructor aborts a transfer that
/// the thread still waits for. A wait() without an isCompleted() before it starts no thread.
class GlooPointToPoint : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Waits for a work of Gloo's. \return  whether it has completed, and was not aborted.
  using Wait = std::function<bool(const WorkPtr&)>;
  /// Runs a whole transfer. \return  as Wait.
  using Transfer = std::function<bool(const Wait&)>;

  /// \param first  the work that the transfer waits for first.
  /// \param timeout  of the transfer, for a wait() without a timeout.
  GlooPointToPoint(WorkPtr first, Transfer transfer, std::chrono::milliseconds timeout);
  ~GlooPointToPoint() override;

  /// Continues the transfer in a thread of its own, before wait() is called.
  void start();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  int sourceRank() const override { return first_->sourceRank(); }
  uint64_t getSequencenumber() const override { return first_->getSequencenumber(); }

 private:
  /// Returns true for the first caller, which must finish the transfer.
  bool claim();
  void finish_transfer(std::chrono::milliseconds timeout);
  bool wait_for(const WorkPtr& work, std::chrono::milliseconds timeout);

  const OwnerProcess owner_;
  const WorkPtr first_;
  const std::chrono::milliseconds timeout_;
  Transfer transfer_;     // until it is over
  WorkPtr current_;       // the work that the transfer waits for; guarded by mutex_
  bool claimed_ = false;  // guarded by mutex_
  bool aborted_ = false;  // guarded by mutex_
  bool arrived_ = false;  // written before the base class is completed, read after
  std::thread waiter_;
};

}  // namespace ddp::backends
