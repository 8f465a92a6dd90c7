#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

class DeviceWatch;
enum class Liveness;
class LateWaits;
class LivenessSocket;
class SharedSteps;
class StoreExecutor;

namespace monitor {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a waiting rank waits for an answer of the store's thread.
inline constexpr milliseconds kAnswerTimeout{100};
// How long a failing rank waits for an answer of the store's thread.
inline constexpr milliseconds kStoreTimeout{2000};
// How long a rank waits for the answers of its peers' sockets.
inline constexpr milliseconds kProbeTimeout{300};
inline constexpr milliseconds kCheckInterval{50};

}  // namespace monitor

/// How a generation of an elastic job ended on this rank.
enum class GenerationEnd { RankLost, Fenced, QuorumLost };

/// Finds the ranks that a failure is to be blamed on, in a second or so; none where none is known.
using FindBlamed = std::function<std::vector<int>()>;

/// The generation of an elastic job whose groups a JobMonitor looks after. A coordinator, and not
/// the store, which may end with a lost rank, then tells why it failed.
struct GenerationOfJob {
  int64_t number = 0;  // 0: the job is not elastic; -1: a process that has not joined it yet
  /// Tells the coordinator that the generation fails on this rank, and because of which other ones,
  /// and returns the coordinator's reason; `why` if there is none in a second. Looks for those only
  /// where the coordinator has no reason yet. On any thread.
  std::function<std::string(const std::string& why, const FindBlamed& find_blamed)> report = {};
};

/// The failure of a job: of all groups that were made of one group, and of that group.
///
/// The first failure is stored under one key of the job's store. A rank that fails writes it, and
/// aborts its backends of all groups. A rank whose wait in any group is late reads it, and does the
/// same. So a rank that waits in one group learns why a rank failed in another one.
///
/// A rank has one JobMonitor for all its groups: one thread that calls the store, and one
/// LivenessSocket. Each group has a GroupMonitor, which knows what the rank waits for.
///
/// Threads: all members, from any thread.
class JobMonitor {
 public:
  struct Setup {
    int rank = 0;
    int size = 1;
    /// Used by the monitors of this job alone. Empty: failures stay on this rank.
    c10::intrusive_ptr<c10d::Store> store = {};
    int store_host = -1;  // the rank whose process hosts it; -1: none, or unknown
    std::shared_ptr<LivenessSocket> liveness = {};
    std::vector<std::string> addresses = {};  // of all ranks' LivenessSockets; may be empty
    GenerationOfJob generation = {};
    /// The DeviceWatch looks so often, and takes the time from here: tests let it pass.
    std::chrono::milliseconds look_every{500};
    std::function<monitor::Clock::time_point()> now = &monitor::Clock::now;
  };
  /// Exchanges the addresses of the ranks' LivenessSockets, and makes the monitor.
  ///
  /// Collective: yes. Blocks: host. Cost: two requests to the store.
  static std::shared_ptr<JobMonitor> connect(Setup setup, c10d::Store& bounded_store);

  explicit JobMonitor(Setup setup);
  ~JobMonitor();
  C10_DISABLE_COPY_AND_ASSIGN(JobMonitor);

  int rank() const { return setup_.rank; }
  int size() const { return setup_.size; }
  int store_host() const { return setup_.store_host; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return setup_.store; }
  /// "" if the rank has no LivenessSocket.
  std::string address() const;
  StoreExecutor& executor();
  LateWaits& late_waits() { return *late_waits_; }
  /// Made when it is first needed.
  DeviceWatch& device_watch();
  monitor::Clock::time_point now() const { return setup_.now(); }
  /// Has the store's thread write this rank's report, if its late waits changed.
  void publish_waits();
  /// Whether this is a rank of the job: a process that it forked is not.
  bool is_rank() const { return owner_.is_this_one(); }

  /// Adds a group, whose backends `abort` ends if the job fails.
  ///
  /// \param abort  runs on any thread, until remove(); may run during remove() or soon after.
  /// \return the group's number, for remove().
  uint64_t add(std::function<void()> abort);
  void remove(uint64_t group);
  /// Lets the steps of a group end the late waits of this rank in any group, while they exist.
  ///
  /// \param store  the group's part of the store.
  void add_steps(const std::shared_ptr<SharedSteps>& steps, c10::intrusive_ptr<c10d::Store> store);

  /// GroupMonitor::add_settling().
  void add_settling(const std::weak_ptr<std::function<void()>>& settle);
  /// The settlings that exist, in the order in which they were added.
  std::vector<std::shared_ptr<std::function<void()>>> settlings();

  /// Requests the job's failure from the store, unless a request is pending, and waits up to
  /// `at_most` for the answer. If a late wait has begun, this request or the next one looks for its
  /// cause, too.
  ///
  /// \return the failure that concerns this rank, of the answers so far.
  std::optional<std::string> request_failure(std::chrono::milliseconds at_most);
  /// Requests the failure after a rank has exited, which it may have recorded before.
  std::optional<std::string> failure_after_exit();

  /// Records why this rank cannot continue, and aborts all groups, in at most three seconds.
  ///
  /// \param find_blamed  of an elastic job: ranks that the coordinator is to look after; may be
  /// empty. \return why the job failed: `why`, or the reason that another rank recorded first.
  std::string fail(std::string why, const FindBlamed& find_blamed = {}) noexcept;
  /// Has wait_until_failure_is_read() not wait for `ranks`: they did not come for as long as a
  /// group's timeout, as a stopped process.
  void expect_no_reader(const std::vector<int>& ranks);
  /// Why the job has failed; empty if it has not.
  std::optional<std::string> failure() const;
  /// Ends a generation as the coordinator says, and aborts all groups, in at most three seconds.
  void end_generation(GenerationEnd how, const std::string& why) noexcept;
  bool is_generation() const { return setup_.generation.number != 0; }
  /// The failure, and what to do after it.
  std::string text_of_failure(const std::string& failure) const;
  /// Throws `text`: as DistBackendError, or as the error of the generation's end.
  [[noreturn]] void throw_failure(const std::string& text);
  /// Whether throw_failure() was called: a collective of this rank failed.
  bool has_thrown() const { return has_thrown_; }
  /// Remembers an error of this rank, as the text of a failure if it leaves a group by an
  /// exception.
  void note_error(const std::string& why) noexcept;
  /// Records that this rank throws, and that each of `ranks` throws the same.
  void note_agreed_error(std::vector<int> ranks);
  /// Forgets both, because the rank goes on.
  void clear_error();
  /// Why this rank fails if an exception drops its part in a group of `ranks`; may be "". Nothing
  /// if each of them throws the same.
  std::optional<std::string> reason_to_leave(const std::vector<int>& ranks) const;
  /// If the job has failed and its store ends with this process: waits until the other ranks have
  /// read why, or have ended, for at most two seconds. Does so once.
  void wait_until_failure_is_read() noexcept;

  /// Finds the ranks of `ranks` whose processes ended, or left the job.
  std::vector<int> find_gone(const std::vector<int>& ranks, std::chrono::milliseconds at_most);
  /// Whether the last find_gone() found that the process of another rank that hosts the store has.
  bool is_host_gone() const { return host_is_gone_; }
  /// Finds the ranks of `ranks` whose hosts do not answer.
  std::vector<int> find_silent(const std::vector<int>& ranks) const;
  /// States that the store does not answer, and who hosts it; "" if it answers.
  std::string describe_silent_store() const;
  /// How long a failing rank waits for an answer of the store, whose host may be gone, or silent.
  std::chrono::milliseconds store_timeout() const;

 private:
  struct Answers;
  struct Steps {
    std::weak_ptr<SharedSteps> steps;
    c10::intrusive_ptr<c10d::Store> store;
  };

  static void update(
      Answers& answers, LateWaits& waits, c10d::Store& store, int rank,
      const std::vector<Steps>& steps);
  std::vector<Steps> steps() const;
  std::vector<Liveness> probe_ranks(
      const std::vector<int>& ranks, std::chrono::milliseconds at_most) const;
  std::optional<std::string> failure_for_this_rank() const;
  std::string record(const std::string& why);
  void set_error(const std::string& why);
  void abort_groups();

  const Setup setup_;
  const OwnerProcess owner_;
  const std::shared_ptr<Answers> answers_;       // shared with jobs that may outlive this
  const std::shared_ptr<LateWaits> late_waits_;  // the same
  std::atomic<bool> host_is_gone_{false};
  std::atomic<bool> has_thrown_{false};
  mutable std::mutex mutex_;  // guards the members below
  std::unique_ptr<StoreExecutor> executor_;
  std::unique_ptr<DeviceWatch> device_watch_;
  std::map<uint64_t, std::function<void()>> groups_;  // abort them
  std::vector<Steps> steps_;
  std::vector<std::weak_ptr<std::function<void()>>> settlings_;
  uint64_t groups_made_ = 0;
  std::optional<std::string> failure_;
  GenerationEnd end_ = GenerationEnd::RankLost;  // with failure_
  std::string last_error_;
  std::vector<int> agreed_by_;     // ranks that throw the last error too; ascending
  bool failure_was_read_ = false;  // wait_until_failure_is_read() has waited
};

}  // namespace ddp
