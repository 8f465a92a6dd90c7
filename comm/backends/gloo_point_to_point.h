#pragma once

#include <chrono>
#include <thread>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::backends {

/// A send or receive of Gloo's that can be polled.
///
/// Gloo's own handle is completed by its wait() and by nothing else, so a loop over isCompleted()
/// would never end. This one's first isCompleted() starts a thread that waits, and a handle that is
/// dropped while it does gives the transfer up. A wait() without a look before it costs no thread.
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
  /// Whether the caller is the first one here, and has to finish the transfer.
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
