#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "board.h"
#include "process_watch.h"
#include "segment.h"

namespace ddp::backends::shm {

/// What collectives fail with that their rank's end cut off.
constexpr const char* kGroupDestroyed = "shm: the process group was destroyed.";
constexpr const char* kGroupAborted = "shm: the process group was aborted.";

/// Logs the exception of a callback of the user's on a future, of which nobody else can be told.
void warn_of_callback() noexcept;

/// What one rank has to know of another.
struct Peer {
  int rank = 0;  // in the group, for messages
  std::shared_ptr<ProcessWatch> process;
  std::shared_ptr<Segment> memory;
};

/// One collective as this rank calls it.
struct Call {
  Descriptor descriptor;
  /// Counts from when those before it are over. Below 0: the group's.
  std::chrono::milliseconds timeout{-1};
  /// This rank's part of the work. buffers[r] is rank r's memory at its descriptor's offset.
  std::function<void(const std::vector<std::byte*>& buffers)> part;
  /// When all ranks have done theirs: copies results out of shared memory.
  std::function<void()> finish;
  /// After that, or with what went wrong. Runs without a lock, and may begin other collectives and
  /// wait for them.
  std::function<void(std::exception_ptr)> tell;
};

/// Carries collectives through in the order in which they begin, the same on every rank.
///
/// No thread is in charge: whoever begins a collective or waits for one does what there is to do
/// for all that came before, as far as the other ranks have come. While nobody does, threads look
/// in now and then, so that a rank that is busy elsewhere does not hold the others up for long.
/// There are two of them, as Gloo has, for one may be in a callback that waits.
///
/// Thread safety: all members. Ranks may be processes or threads.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  /// \param board  the segment of a Board, the same for all ranks.
  /// \param peers  by rank, this one included.
  /// \param arena  this rank's memory, which stays as it is once a collective has failed for good.
  static std::shared_ptr<Exchange> make(
      int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers,
      std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout);

  /// Announces the call and does what can be done at once. Waits only for a rank that is more than
  /// kMostInFlight collectives behind.
  ///
  /// \return its number.
  /// \throws c10::DistBackendError  after a collective failed for good.
  uint64_t begin(Call call);

  /// As begin(), but does nothing for it, so that nobody's callback runs on this thread: whoever
  /// drives the exchange will.
  uint64_t announce(Call call);

  /// Does what can be done now.
  void progress();

  /// Waits until collective `number` is over, well or not.
  ///
  /// \return whether it is, after at most `at_most`.
  bool wait(uint64_t number, std::chrono::milliseconds at_most);

  /// Counts futures that somebody may wait for, and not here: as long as there are any, the threads
  /// look in as soon as there is something to do.
  void count_future(int change) { futures_ += change; }

  /// Does what can be done now, and looks whether the other ranks are still there.
  void poll() {
    progress();
    look_after_peers();
  }

  /// Fails what is under way and what comes after it, on this rank, and with that on the others.
  void fail(const std::string& why);

  /// Fails what is under way, and tells the other ranks that this one is gone. To be called before
  /// the last reference goes; again, it does nothing.
  void close();

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// How many collectives this rank has begun.
  uint64_t begun() const { return board_of(rank_).begun.load(); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    uint64_t number;
    std::chrono::milliseconds timeout;
    Clock::time_point deadline;
    Call call;
    std::exception_ptr error;
  };
  using PendingPtr = std::unique_ptr<Pending>;

  struct Trouble {
    std::string what;   // as this rank sees it
    std::string cause;  // where it began, which may be elsewhere
  };

  Exchange(
      int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers,
      std::shared_ptr<Arena> arena, std::chrono::milliseconds timeout);

  int size() const { return static_cast<int>(peers_.size()); }
  RankBoard& board_of(int rank) const { return board_->of(rank); }
  enum class Meanwhile { Drive, Sleep };
  uint64_t enter(Call call, Meanwhile meanwhile);
  void wake_keeper();
  uint64_t least(std::atomic<uint64_t> RankBoard::*count) const;
  bool has_left(int rank, uint64_t number) const;
  bool somebody_left(uint64_t number) const;
  bool can_progress() const;
  PendingPtr progress_locked();
  void do_part(Pending& pending);
  const Descriptor& descriptor_of(int rank, const Pending& pending) const;
  std::string mismatch(const Pending& pending) const;
  bool is_in_gloo(const Pending& pending) const;
  Trouble trouble(const Pending& pending) const;
  std::string missing(const Pending& pending) const;
  std::string what_failed(const Pending& pending, const std::string& how) const;
  void look_after_peers();
  void give_up_locked(const Pending& pending, const Trouble& trouble);
  void break_off_locked(const std::string& why, uint32_t how, const std::string& cause);
  PendingPtr pop_broken();
  static void tell(PendingPtr ended);
  void keep_going();

  const int rank_;
  const std::shared_ptr<Segment> board_memory_;
  Board* const board_;
  const std::vector<Peer> peers_;
  const std::shared_ptr<Arena> arena_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<int> futures_{0};

  std::mutex begin_mutex_;  // one collective begins at a time
  std::mutex work_mutex_;   // one thread works at a time
  std::mutex queue_mutex_;  // guards the five below; taken last
  std::deque<PendingPtr> pending_;
  std::string broken_because_;
  bool closing_ = false;
  int idle_keepers_ = 0;
  std::condition_variable something_pending_;

  std::atomic<bool> broken_{false};  // broken_because_ says why
  size_t parts_done_ = 0;            // of pending_, from the front; with work_mutex_
  std::atomic<uint64_t> over_{0};    // collectives that ended

  std::vector<std::thread> keepers_;
};

}  // namespace ddp::backends::shm
