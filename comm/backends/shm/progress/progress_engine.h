#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/internal/owner_process.h>

#include "../memory/arena.h"
#include "../sync/control_block.h"
#include "mailbox.h"
#include "peer_monitor.h"
#include "progress_threads.h"

namespace ddp::backends::shm {

/// The errors of collectives whose rank destroys or aborts its group.
constexpr const char* kGroupDestroyed = "shm: the process group was destroyed.";
constexpr const char* kGroupAborted = "shm: the process group was aborted.";

/// The reason with which a rank aborts that cannot announce its collective `name`, for all ranks.
std::string why_not_started(
    const char* name, int rank, int world_size, const std::exception& error);

/// Logs the current exception, of a user's callback on a future: no caller can receive it.
void warn_callback_threw() noexcept;

/// One collective as this rank calls it.
struct Call {
  using Buffers = std::vector<std::byte*>;

  Descriptor descriptor;
  /// The owner of the memory that other ranks access. If the collective fails, it exists as long as
  /// the groups that use the arena.
  std::shared_ptr<const void> memory;
  /// Counts from the completion of the collective before this one. Negative: the group's timeout.
  std::chrono::milliseconds timeout{-1};
  /// Runs before the first reduce step. Empty: equal descriptors suffice, and there is one round.
  std::function<Agreement(const Buffers& buffers)> check_agreement;
  /// Does this rank's share of the work, once all ranks have announced the collective. buffers[r]
  /// is rank r's memory at the offset of its descriptor. Runs once per round, after all ranks have
  /// finished the round before.
  std::function<void(const Buffers& buffers)> reduce_step;
  /// Copies results out of shared memory, once all ranks have finished their reduce step.
  std::function<void()> copy_out;
  /// Runs last, with the error if the collective failed. It runs without a lock: it may start other
  /// collectives and wait for them.
  std::function<void(std::exception_ptr)> on_complete;

  void keep(at::Tensor shared) { memory = std::make_shared<at::Tensor>(std::move(shared)); }
};

/// A collective that this rank has announced but not completed.
struct Pending {
  uint64_t number;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point deadline;  // valid for the first in the queue only
  Call call;
  std::exception_ptr error;
  uint64_t rounds_left = 0;  // 0 until the ranks have agreed on their number
};
using PendingPtr = std::unique_ptr<Pending>;

/// The pending collectives of a rank, in the order of their numbers. Those at the front have
/// finished their reduce step.
///
/// Thread safety: all members. One thread at a time makes progress: calls next(), front(),
/// mark_reduced() and pop_completed(). A `Pending*` stays valid until that thread pops it, or until
/// abort().
class CollectiveQueue {
 public:
  /// \throws c10::DistBackendError  after abort(), with its reason.
  void push(PendingPtr pending);

  /// The next collective to run its reduce step, and the next one to complete; each may be null.
  struct Next {
    Pending* to_reduce = nullptr;
    Pending* to_complete = nullptr;
  };
  Next next();
  Pending* front();

  /// Records that `to_reduce` has finished its reduce step.
  void mark_reduced() { ++reduced_; }
  /// Removes `to_complete`, and starts the timeout of the next collective.
  PendingPtr pop_completed();
  /// Removes the front, with abort()'s reason as its error. Null before abort(), and if the queue
  /// is empty.
  PendingPtr pop_aborted();

  /// How many collectives were removed.
  uint64_t completed() const { return completed_.load(); }

  /// Fails the queue. The first reason is kept.
  void abort(const std::string& why);
  bool is_aborted() const { return aborted_; }
  std::string abort_reason();

 private:
  std::mutex mutex_;  // guards all members except the atomics and reduced_
  std::deque<PendingPtr> pending_;
  size_t reduced_ = 0;  // of pending_, from the front; used by the thread that makes progress
  std::string abort_reason_;
  std::atomic<bool> aborted_{false};  // whether abort_reason_ is set
  std::atomic<uint64_t> completed_{0};
};

/// Completes collectives in the order in which this rank starts them, which is the same on every
/// rank, and messages between two ranks.
///
/// Every thread that starts one or waits for one makes progress: it does everything that the other
/// ranks' states allow, for all that is pending. The process's ProgressThreads do so
/// every few milliseconds while no thread waits, so that a rank that is busy elsewhere does not
/// delay the others for long.
///
/// Thread safety: all members. Ranks may be processes or threads.
class ProgressEngine : public std::enable_shared_from_this<ProgressEngine> {
 public:
  /// How long a waiting thread sleeps before it checks whether the other ranks still exist.
  static constexpr std::chrono::milliseconds kCheckPeers{50};

  /// \param rank  of this process, in `peers`.
  /// \param control  the same for all ranks.
  /// \param peers  by rank of the host, this rank included.
  /// \param arena  this rank's; keeps the memory of collectives that fail.
  static std::shared_ptr<ProgressEngine> make(
      int rank, std::shared_ptr<ControlBlock> control, std::vector<Peer> peers,
      std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout);

  /// Announces the collective and makes progress. Waits only if some rank is more than
  /// kMostInFlight collectives late.
  ///
  /// \return  the collective's number.
  /// \throws c10::DistBackendError  after the engine aborted. c10::Error  in a forked process, as
  ///         each call that announces or waits; others do nothing there.
  uint64_t start(Call call);

  /// The same without progress, so that no callback runs on this thread: a progress thread or a
  /// waiting thread completes the collective.
  uint64_t announce(Call call);

  /// Sends or receives a message.
  ///
  /// \throws c10::DistBackendError  after the engine aborted.
  void send(Message message);
  void receive(Message message);

  void progress();

  /// Waits until collective `number` is complete or has failed.
  ///
  /// \return  whether it is, after at most `at_most`.
  bool wait(uint64_t number, std::chrono::milliseconds at_most);
  /// The same until a message is over.
  bool wait_for_message(c10::function_ref<bool()> is_over, std::chrono::milliseconds at_most);

  /// Counts futures that a thread may wait for without this engine. While there are any, the
  /// progress threads wait on the doorbell instead of looking every few milliseconds.
  void count_future(int change) { futures_ += change; }

  bool has_futures() const { return futures_ > 0; }

  /// Whether a collective that this rank has announced, or a message, is not over.
  bool has_pending() const { return announced() > queue_.completed() || mailbox_.is_active(); }

  /// Waits on the doorbell until progress() may do something.
  void wait_until_progress(std::chrono::milliseconds at_most) {
    monitor_.doorbell().wait_until([this] { return can_progress(); }, at_most);
  }

  /// Aborts if a rank that the first pending collective or a message needs has ended, or its
  /// timeout has passed.
  void check_peers();

  /// Makes the progress that is possible now, and checks whether the other ranks still exist.
  void poll() {
    progress();
    check_peers();
  }

  /// Aborts: fails the pending collectives and all later ones, on this rank and thereby on all.
  void fail(const std::string& why);

  /// Fails the pending collectives, and reports to the other ranks that this rank has left. To be
  /// called before the last reference is dropped. A second call does nothing, and neither does one
  /// in a process that this rank forked.
  void close();

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// \throws c10::Error  in a process that this rank forked.
  void check_owner() const { owner_.check("shm"); }

  /// How many collectives this rank has announced.
  uint64_t announced() const { return monitor_.own_state().announced.load(); }
  /// A rank's number in the group, by its place among those of the host.
  int rank_at(int place) const { return monitor_.rank_at(place); }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  ProgressEngine(
      PeerMonitor monitor, std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout);

  enum class WhileFull { kProgress, kSleep };
  uint64_t announce(Call call, WhileFull while_full);
  bool can_progress() const;
  PendingPtr progress_locked();
  PendingPtr try_complete(Pending& pending);
  void reduce(Pending& pending);
  bool check_agreement(Pending& pending);
  void abort_locked(const Pending& pending, const PeerFailure& failure);
  void abort_locked(const std::string& why, Stopped how, const std::string& cause);
  PendingPtr pop_aborted();
  void complete_aborted();
  static void complete(PendingPtr pending);
  void progress_messages(Mailbox::IfBusy if_busy);
  void check_collective_locked();
  void check_messages_locked();
  bool wait_until(
      c10::function_ref<bool()> is_over, std::chrono::milliseconds at_most,
      Mailbox::IfBusy if_busy);
  void call(const Mailbox::Ends& ends);

  PeerMonitor monitor_;
  const std::shared_ptr<Arena> arena_;
  const OwnerProcess owner_;
  std::atomic<std::chrono::milliseconds> timeout_;  // of collectives that give none
  std::atomic<int> futures_{0};
  std::mutex announce_mutex_;  // held by the one thread that announces
  std::mutex progress_mutex_;  // held by the one thread that makes progress
  CollectiveQueue queue_;
  Mailbox mailbox_;
  std::atomic<bool> closed_{false};
  ProgressThreads& threads_ = ProgressThreads::of_this_process();
};

}  // namespace ddp::backends::shm
