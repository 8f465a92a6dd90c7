#pragma once

#include <sys/types.h>

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

#include "board.h"
#include "segment.h"

namespace ddp::backends::shm {

/// What one rank has to know of another.
struct Peer {
  pid_t pid = 0;
  /// Readable once the process has ended; -1 where it cannot be watched.
  int pidfd = -1;
  std::shared_ptr<Segment> memory;
};

/// One collective as this rank calls it.
struct Call {
  const char* name = "";  // for messages
  Descriptor descriptor;
  std::chrono::milliseconds timeout{-1};  // below 0: the group's
  /// This rank's part of the work. buffers[r] is rank r's memory at its descriptor's offset.
  std::function<void(const std::vector<std::byte*>& buffers)> part;
  /// When all ranks have done theirs: copies results out of shared memory.
  std::function<void()> finish;
  /// After that, or with what went wrong. Runs without a lock, and may begin other collectives.
  std::function<void(std::exception_ptr)> tell;
};

/// Carries collectives through in the order in which they begin, the same on every rank.
///
/// No thread is in charge: whoever begins a collective or waits for one does what there is to do
/// for all that came before, as far as the other ranks have come. While nobody does, a thread looks
/// in now and then, so that a rank that is busy elsewhere does not hold the others up for long.
///
/// Thread safety: all members. Ranks may be processes or threads.
class Exchange {
 public:
  /// \param board  the segment of a Board, the same for all ranks.
  /// \param peers  by rank, this one included.
  Exchange(
      int rank, std::shared_ptr<Segment> board, std::vector<Peer> peers,
      std::chrono::milliseconds timeout);
  ~Exchange();

  /// Announces the call and does what can be done at once. Waits only for a rank that is more than
  /// kMostInFlight collectives behind.
  ///
  /// \return its number.
  /// \throws c10::DistBackendError  after a collective failed for good.
  uint64_t begin(Call call);

  /// Does what can be done now.
  void progress();

  /// Waits until collective `number` is over, well or not.
  ///
  /// \return whether it is, after at most `at_most`.
  bool wait(uint64_t number, std::chrono::milliseconds at_most);

  /// Fails what is under way, and tells the other ranks that this one is gone.
  void close();

  void set_timeout(std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    uint64_t number;
    std::chrono::milliseconds timeout;
    Clock::time_point deadline;
    Call call;
    std::exception_ptr error;
  };
  using Ended = std::vector<std::unique_ptr<Pending>>;

  RankBoard& board_of(int rank) const { return board_->of(rank); }
  uint64_t least(std::atomic<uint64_t> RankBoard::*count) const;
  bool can_progress() const;
  void progress_locked(Ended& ended);
  void do_part(Pending& pending);
  std::string mismatch(const Pending& pending) const;
  std::string trouble(const Pending& pending) const;
  std::string missing(const Pending& pending) const;
  void look_after_peers();
  void break_off(const std::string& why, uint32_t how, Ended& ended);
  void check_whole() const;
  static void tell(Ended& ended);
  void keep_going();

  const int rank_;
  const std::shared_ptr<Segment> board_memory_;
  Board* const board_;
  const std::vector<Peer> peers_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex begin_mutex_;          // one collective begins at a time
  std::mutex work_mutex_;           // one thread works at a time
  mutable std::mutex queue_mutex_;  // guards the four below; taken last
  std::deque<std::unique_ptr<Pending>> pending_;
  std::string broken_because_;
  bool closing_ = false;
  std::condition_variable something_pending_;  // with queue_mutex_

  size_t parts_done_ = 0;          // of pending_, from the front; with work_mutex_
  std::atomic<uint64_t> over_{0};  // collectives that ended

  std::thread keeper_;
};

}  // namespace ddp::backends::shm
