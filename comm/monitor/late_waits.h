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
#include "monitor/call_difference.h"
#include "monitor/rank_report.h"

namespace ddp {

/// The late waits of a rank in all groups of its job: reports them, and looks for their cause.
///
/// One rank of those that wait late looks for all: it reads the ranks' reports once a second, and
/// the calls of those whose calls changed. It records as the job's failure two ranks whose
/// collectives differ, or a cycle of ranks that wait for each other, which it has to see twice with
/// equal reports: within two and five seconds after the last of these ranks began to wait late.
///
/// A rank whose wait has failed takes the part over, because it soon leaves.
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
    StepsText steps_text = {};
  };

  LateWaits(int rank, int size, std::string address);

  /// The key of the group of `list`.
  static std::string list_name(const std::string& group, CallHistory::Lane lane);
  /// Adds the calls of a group; while they exist.
  ///
  /// \param job_ranks  of the group's ranks.
  void add_group(
      const std::string& key, const std::shared_ptr<const CallHistory>& calls,
      std::vector<int> job_ranks);

  /// Adds a wait of this thread. \return its number, for end().
  ///
  /// \param late_for  how long ago that could have been, for reported_for().
  uint64_t begin(Wait wait, std::chrono::milliseconds late_for = {});
  /// To be called before the thread goes on.
  void end(uint64_t number);
  /// For how long the first wait of this thread that has not ended has been in its list; 0: none.
  std::chrono::milliseconds reported_for();

  /// Whether to call look(). Then returns false for a second.
  bool is_look_due();
  /// Has the next look() take the part of looking for all.
  void take_over();
  void make_look_due();
  /// Writes this rank's report, if it changed.
  void publish(c10d::Store& store);
  /// Does so, and reads the others' if it is this rank's part. \return the failure, once recorded.
  std::optional<std::string> look(c10d::Store& store);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Wait wait;
    std::thread::id thread;
    Clock::time_point since;
  };

  struct Group {
    std::weak_ptr<const CallHistory> calls;
    std::vector<int> job_ranks;
  };

  RankReport make_report();
  std::vector<RankCalls> own_calls();
  BlockedRank describe_blocked();
  bool is_late();
  bool looks_for_all(c10d::Store& store);
  void read_calls(c10d::Store& store, const std::vector<RankReport>& reports);
  std::optional<std::string> find_cycle(const std::vector<RankReport>& reports);

  const int rank_, size_;
  const std::string address_;
  std::mutex mutex_;                     // guards the members up to takes_over_
  std::map<std::string, Group> groups_;  // by key
  std::map<uint64_t, Entry> waits_;
  uint64_t waits_begun_ = 0;
  Clock::time_point next_look_{};
  bool takes_over_ = false;
  std::string published_;
  uint64_t published_calls_ = 0;
  bool looks_for_all_ = false;
  std::map<int, std::pair<uint64_t, std::vector<RankCalls>>> calls_;  // that were read, by rank
  std::vector<std::pair<int, std::string>> seen_;  // the last look's cycle: ranks and reports
};

}  // namespace ddp
