#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backends/gloo/message_group.h"
#include "base/deadline.h"

namespace ddp::backends {

/// A send or receive over Gloo that can be polled, made of one or two works of Gloo's.
///
/// Gloo's own work completes in its wait() only, so that a loop over isCompleted() would never end.
/// Here the first isCompleted() starts a thread that waits. The destructor aborts a transfer that
/// the thread still waits for. A wait() without an isCompleted() before it starts no thread.
///
/// In a MessageGroup every wait polls: a wait of Gloo's that times out would close the connections
/// of all groups. The transfer ends by the group's timeout, or by the end of the group.
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
  /// \param peer  the other rank in the group; -1: any.
  GlooPointToPoint(WorkPtr first, Transfer transfer, MessageGroupPtr group, int peer);
  ~GlooPointToPoint() override;

  /// Continues the transfer in a thread of its own, before wait() is called.
  void start();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return first_->getSequencenumber(); }

 private:
  /// Returns true for the first caller, which must finish the transfer.
  bool claim();
  void finish_transfer(std::chrono::milliseconds timeout);
  bool wait_for(const WorkPtr& work, std::chrono::milliseconds timeout);
  bool wait_in_group(std::chrono::milliseconds timeout);
  void abort_if_over();
  std::string why_over();

  const OwnerProcess owner_;
  const WorkPtr first_;
  const std::chrono::milliseconds timeout_;
  const MessageGroupPtr group_;  // may be null
  const int peer_ = -1;
  Transfer transfer_;     // until it is over
  WorkPtr current_;       // the work that the transfer waits for; guarded by mutex_
  bool claimed_ = false;  // guarded by mutex_
  bool aborted_ = false;  // guarded by mutex_
  // In a group; guarded by mutex_.
  std::string reason_;                     // of the abort
  std::optional<Deadline> deadline_;       // from the first wait on
  std::optional<Deadline> last_messages_;  // once the peer has left
  bool arrived_ = false;                   // written before the base class is completed, read after
  std::thread waiter_;
};

}  // namespace ddp::backends
