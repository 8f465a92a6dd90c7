#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <ddp/process_group_options.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Says what a rank with more steps than another one did, and the rule that it broke: "began a
/// training forward pass that" and "Every rank has to train on as many batches".
struct StepsText {
  std::string began, rule;

  /// The likely cause of collectives that do not match. Ends with ": ".
  std::string explain(const std::string& more, const std::string& fewer) const {
    return more + " " + began + " " + fewer + " did not. " + rule + ": ";
  }
};

/// Steps that every rank of a group runs equally often, and that their owner counts: a wrapper's
/// forward passes. A rank whose step failed, or that ran fewer of them, does not come to the
/// collectives that follow, for which other ranks wait.
///
/// Threads: all members, from any thread.
class SharedSteps {
 public:
  virtual ~SharedSteps() = default;

  /// A number that grows with each step of this rank, and is equal on ranks that ran the same
  /// steps.
  virtual uint64_t count() const = 0;
  virtual const StepsText& text() const = 0;
  /// Reads from the group's store what the ranks recorded. Called on the store's thread while this
  /// rank waits late.
  virtual void read(c10d::Store& store) = 0;
  /// The failure found by read(), if any: why a rank that this one waits for does not come.
  virtual std::optional<std::string> failure() const = 0;
};

class CallHistory;
struct CollectiveCall;
class DevicePace;
class DeviceWorks;
struct FlightRecord;
class JobMonitor;
struct AwaitedCall;
struct RankReport;

/// Describes what a rank waits for, in the same words on every rank: "reducing bucket 3 of 5".
/// Called only when the wait is late or fails.
using WaitPoint = c10::function_ref<std::string()>;

/// The ranks whose part in a collective this rank waits for.
enum class Peers {
  All,
  /// The other ranks may have finished, and exited (a recv, a gather): the backend notices the end
  /// of a rank that is needed.
  Some,
};

/// An error that every rank of the group throws at the same call, with the same text, so that no
/// rank waits for another one because of it. The group stays usable.
class AgreedError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// The ranks vote, and some have other values than most: computation or memory there is wrong.
class WrongRanks : public AgreedError {
 public:
  using AgreedError::AgreedError;

  /// Whether the rank that throws it is one of them.
  bool has_this_rank = false;
};

/// Detects failed peers, so that collectives do not hang.
///
/// The JobMonitor, which all groups of a job share, holds the failure. A rank whose wait fails, or
/// lasts longer than half a second, asks it, throws the recorded text and aborts the job's groups:
/// so every rank throws the same text, whichever group it waits in, and no rank waits for the
/// timeout. After that the groups stay aborted.
///
/// A rank that ends without recording a failure is found by its LivenessSocket: at once if a
/// collective breaks, else after four seconds of waiting.
///
/// A rank whose wait fails, or lasts two seconds, reports it with its latest calls (LateWaits). One
/// of these ranks finds those that called different collectives, and those that wait for each other
/// in different groups. A rank that has made fewer calls, all of them the same, matches every other
/// rank.
///
/// A waiting thread makes no request to the store itself: the job's own thread does, and the
/// waiting thread uses the answers that have arrived. If the process that hosts the store is
/// stopped, waits end with their timeout, and the text names the rank that does not answer.
///
/// Where only a stream waits for a collective, no thread of the program waits here. The job's
/// DeviceWatch does so for it, while such a collective has not ended. It sends nothing before the
/// device has ended no collective for five seconds, or for twice as long as between those before,
/// and at most a tenth of the timeout. A host that polls for the device waits so, too, once its
/// pace is known.
///
/// Texts name ranks by their number in the job.
///
/// Cost: nothing for a wait of less than half a second. Beyond, two small requests to the store
/// each half second and, after two seconds, one more a second, and once a report of 6 KB for each
/// group that the rank waits in; the same for any world size, but for one waiting rank of the job,
/// which reads the reports of all ranks once a second. Probes go to the peers and not to the store.
/// Threads: all members, from any thread.
class GroupMonitor : public std::enable_shared_from_this<GroupMonitor> {
 public:
  struct Setup {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{0};  // of the group's collectives
    std::shared_ptr<JobMonitor> job = {};
    std::vector<int> job_ranks = {};  // of the group's ranks; empty: the same numbers
    std::string key = {};             // prefix of the group's keys in the job's store
    /// Called on any thread until leave_job(). Must not need this monitor.
    std::function<void()> abort_backends = {};
    /// The collectives that this rank calls in the group; empty: its calls are not compared.
    std::shared_ptr<const CallHistory> calls = {};
    std::string group_name = {};
    std::string coordinate =
        {};  // of this rank in a mesh: "dp 1, tp 0"; "" if the group is no axis
    /// Whether one of the group's backends waits on streams.
    bool has_streams = false;
    /// Whether the watchdog of that backend completes getFutureResult() of its works.
    bool reports_results = false;
    /// Whether it runs single messages in the order of the calls, after the collectives before
    /// them: NCCL does where the group has device_id.
    bool serializes_messages = false;
  };

  explicit GroupMonitor(Setup setup);
  ~GroupMonitor();
  C10_DISABLE_COPY_AND_ASSIGN(GroupMonitor);

  /// Waits on the host until `work` is complete.
  ///
  /// \throws c10::DistBackendError  if it fails, the group has failed, or the group's timeout has
  ///         passed; the group is then aborted.
  void wait(c10d::Work& work, WaitPoint where, Peers peers = Peers::All);

  /// The same for a `work` that completes on the current stream: the host does not wait.
  void wait_on_stream(c10d::Work& work, WaitPoint where);

  /// Waits on the host until `is_over`, by polling: the end of work on a device wakes no thread.
  ///
  /// \param work  that has completed then, if it is the handle of a collective.
  void poll(
      c10::function_ref<bool()> is_over, WaitPoint where, Peers peers = Peers::All,
      const c10d::Work* work = nullptr);

  /// Waits until `wait` returns true; `wait` itself blocks for at most the time that it is passed.
  void wait_until(
      c10::function_ref<bool(std::chrono::milliseconds)> wait, WaitPoint where,
      Peers peers = Peers::All, const c10d::Work* work = nullptr);

  /// Has the job's DeviceWatch look at a collective that has started on a device, until it ends.
  /// Only where the backend reports results, and not in a capture, which starts nothing.
  ///
  /// \param is_single_message  not of a batch.
  void watch(c10d::Work& work, const CollectiveCall& call, bool is_single_message = false);

  /// Looks for collectives of watch() that do not end, as a late wait does, and for those that the
  /// backend has ended itself: with an error, or after its timeout. Only the DeviceWatch calls it.
  ///
  /// \param pace  of the device; updated. Nothing is sent while the device keeps it.
  /// \return  whether there is something to look at.
  bool look_at_device(DevicePace& pace, std::chrono::steady_clock::time_point now) noexcept;

  /// Waits on the host until the collectives of watch() have ended.
  ///
  /// \throws c10::DistBackendError  as wait().
  void wait_for_device(WaitPoint where);

  /// Runs `step`, which other ranks run too: an exception of `step` is a failure of the group.
  void abort_on_error(WaitPoint doing, c10::function_ref<void()> step);

  /// Records why this rank cannot continue, and aborts the job's groups. In a group of one, as
  /// note_error().
  ///
  /// \return why the job failed: `why`, or the reason that another rank recorded first.
  std::string fail(const std::string& why) noexcept;

  /// Why the job's groups are aborted; empty if they are not.
  std::optional<std::string> aborted() const;
  /// \throws c10::DistBackendError  if the group is aborted.
  void check() const;

  /// Lets `steps` end the late waits of this rank, and explain collectives that do not match, while
  /// it exists.
  ///
  /// \return how many were added before: the same on every rank if the ranks add theirs in the same
  ///         order.
  int add_steps(const std::shared_ptr<SharedSteps>& steps);
  /// Runs `call` with the group's store, on the thread that talks to it; not in a group of one.
  void post(std::function<void(c10d::Store&)> call);

  /// Has settle_job() call `settle`, while it exists. In the same order on all ranks.
  void add_settling(const std::shared_ptr<std::function<void()>>& settle);
  /// Throws the problems of passes whose status no later pass has read yet.
  ///
  /// Collective: yes, over the groups that have such passes. Blocks: host.
  void settle_job();

  /// Remembers an error that does not affect the other ranks, as the text of leave_by_exception().
  void note_error(const std::string& why) noexcept;
  /// Forgets it, because the rank goes on.
  void clear_error();

  /// Throws `text`, which every rank throws at this call: none needs a message when this rank then
  /// leaves the group.
  ///
  /// \param wrong_ranks  of the group; where there are some, the error is a WrongRanks.
  [[noreturn]] void throw_agreed(const std::string& text, const std::vector<int>& wrong_ranks = {});

  /// Fails the group, because this rank drops it while an exception unwinds the stack.
  void leave_by_exception() noexcept;
  /// Ends the group's part in the job, before its backends are destroyed. If the job has failed and
  /// its store ends with this process: waits until the other ranks have read why, or have ended,
  /// for at most two seconds.
  void leave_job() noexcept;

  /// The group's latest calls, and why it has failed.
  FlightRecord flight_record() const;

  int rank() const { return setup_.rank; }
  /// The number in the job of a rank of the group.
  int job_rank(int rank) const;
  int size() const { return setup_.size; }
  /// Whether the job has other ranks, although the group may be of one.
  bool job_has_others() const;
  /// "rank 1 of 3"; in a part of the job "rank 5 of 8 (rank 1 of group [4, 5])"; in an axis of a
  /// mesh "rank 5 of 8 (dp 1, tp 0)".
  std::string rank_text() const;

 private:
  class LateWait;
  struct DeviceWait;

  bool is_watching() const;
  std::vector<int> job_ranks() const;
  uint64_t begin_late_wait(
      const std::string& where, const c10d::Work* work, std::chrono::milliseconds late_for = {});
  bool poll_at_pace(c10::function_ref<bool()> is_over, std::chrono::microseconds poll_every);
  std::optional<AwaitedCall> awaited_call(const std::string& where, const c10d::Work* work) const;
  std::vector<RankReport> waiting_ranks();
  std::string describe_uneven_steps(const std::vector<RankReport>& waiting) const;
  std::vector<std::shared_ptr<SharedSteps>> shared_steps() const;
  uint64_t count_steps() const;
  std::string add_arrivals(const std::string& what, const std::string& where);
  std::string describe_gone_ranks(std::chrono::milliseconds at_most);
  std::vector<int> blamed_ranks();
  std::string errors_of(const std::vector<int>& ranks);
  std::string describe_silent_ranks() const;
  std::string advice_for_order() const;
  std::string describe_failure(const std::string& what, WaitPoint where);
  [[noreturn]] void throw_failed(const std::exception_ptr& cause, WaitPoint where);
  [[noreturn]] void throw_aborted(const std::string& why);

  const uint64_t number_in_job_;
  const Setup setup_;  // without abort_backends, which the job owns: it may refer to the group
  const c10::intrusive_ptr<c10d::Store> store_;  // the group's part of the job's; may be null
  mutable std::mutex mutex_;                     // guards the members below
  std::vector<std::weak_ptr<SharedSteps>> steps_;
  int steps_added_ = 0;
  mutable uint64_t most_steps_ = 0;  // that count_steps() has returned
  const std::unique_ptr<DeviceWorks> device_works_;
  std::unique_ptr<DeviceWait> device_wait_;  // late; belongs to the DeviceWatch's thread
};

/// Returns the monitor of a group that this library made, or a new one for any other group; all
/// ranks must ask for such a new one in the same order. The group must outlive the monitor.
std::shared_ptr<GroupMonitor> monitor_of(const ProcessGroup& group);

}  // namespace ddp
