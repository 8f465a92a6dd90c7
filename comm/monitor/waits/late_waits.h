#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "calls/call_history.h"
#include "monitor/rank_report.h"

namespace ddp {

/// The late waits of a rank in all groups of its job: reports them, and looks for ranks that wait
/// for each other.
///
/// One blocked rank of the job looks for all: it reads all ranks' reports once a second, and
/// records a cycle that it sees twice with equal reports as the job's failure. So a cycle ends
/// within five seconds after its last rank began to wait.
///
/// A rank counts as blocked if each thread that made one of the calls that its groups keep waits
/// late, for a call whose handle is known. A thread that waits otherwise may go on, and so may a
/// thread that has ended: its work may have passed to another one. Of a thread that never made a
/// call, nothing is known.
///
/// Threads: any; publish() and look(), on the store's thread alone.
class LateWaits {
 public:
  struct Wait {
    std::string group;  // its key
    std::string where;  // the WaitPoint
    uint64_t steps = 0;
    std::optional<AwaitedCall> call = {};  // nothing: unknown
    std::string group_name = {};
  };

  LateWaits(int rank, int size, std::string address);

  /// The key of the group of `list`.
  static std::string list_name(const std::string& group, CallHistory::Lane lane);
  /// Adds the calls of a group; while they exist.
  void add_group(const std::string& key, const std::shared_ptr<const CallHistory>& calls);

  /// Adds a wait of this thread. \return its number, for end().
  uint64_t begin(Wait wait);
  /// To be called before the thread goes on.
  void end(uint64_t number);
  /// For how long the first wait of this thread that has not ended has been in its list; 0: none.
  std::chrono::milliseconds reported_for();

  /// Whether to call look(). Then returns false for a second.
  bool is_look_due();
  /// Writes this rank's report, if it changed. \return whether the rank is blocked.
  bool publish(c10d::Store& store);
  /// Does so, and reads the others' if it is this rank's part. \return the failure, once recorded.
  std::optional<std::string> look(c10d::Store& store);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Wait wait;
    std::thread::id thread;
    Clock::time_point since;
  };

  RankReport make_report();
  BlockedRank describe_blocked();

  const int rank_, size_;
  const std::string address_;
  std::mutex mutex_;  // guards the members up to next_look_
  std::map<std::string, std::weak_ptr<const CallHistory>> groups_;  // by key
  std::map<uint64_t, Entry> waits_;
  uint64_t waits_begun_ = 0;
  Clock::time_point next_look_{};
  std::string published_;
  bool looks_for_all_ = false;
  std::vector<std::pair<int, std::string>> seen_;  // the last look's cycle: ranks and reports
};

}  // namespace ddp
