#pragma once

#include <atomic>
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
#include <ddp/internal/owner_process.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

class CallHistory;
class PresenceSocket;
class StoreExecutor;

/// What a rank waits for, in words that are the same on every rank: "reducing bucket 3 of 5". Asked
/// only when the wait is late or fails.
using WaitPoint = c10::function_ref<std::string()>;

/// Whose part in a collective this rank waits for.
enum class Peers {
  All,
  /// The other ranks may be done, and gone (a recv, a gather): the backend notices the end of a
  /// rank that is needed.
  Some,
};

/// An error that every rank of the group throws at the same call, with the same text: no rank waits
/// for another one because of it, and the group stays usable.
class AgreedError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// Sees to it that no rank of a process group waits for one that will not come.
///
/// The first failure of the group stands under one key of the group's store. A rank that fails
/// writes it and aborts its backends. A rank whose wait fails, or lasts longer than half a second,
/// looks for it, throws its text and aborts too: so every rank throws the same text, and no rank
/// waits for the timeout. After that the group stays aborted.
///
/// A rank that ends without a word is found by its PresenceSocket: at once where a collective
/// breaks, else after four seconds of waiting.
///
/// Ranks that call different collectives are found by their CallHistory: a rank whose wait fails,
/// or lasts two seconds, compares its calls with those of the ranks that did so before. A rank that
/// is behind, and has called the same so far, differs from nobody.
///
/// No waiting thread talks to the store: the monitor's own thread does, and the waiting thread
/// takes what answer there is. Where the process that hosts the store is stopped, waits end with
/// their timeout, and the text says which rank does not answer.
///
/// Cost: nothing for a wait of less than half a second. Beyond, two small requests to the store
/// each half second and, after two seconds, four for each doubling of the time; the same for any
/// world size. Probes go to the peers and not to the store.
/// Threads: all members, from any thread.
class GroupMonitor {
 public:
  struct Setup {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{0};  // of the group's collectives
    /// For this monitor alone. Empty: failures stay on this rank.
    c10::intrusive_ptr<c10d::Store> store = {};
    int store_host = -1;  // the rank whose process hosts it; -1: none, or unknown
    std::shared_ptr<PresenceSocket> presence = {};
    std::vector<std::string> addresses = {};  // of all ranks' PresenceSockets; may be empty
    std::function<void()> abort_backends = {};
    /// What this rank calls in the group; empty: its calls are not compared.
    std::shared_ptr<const CallHistory> calls = {};
    std::string group_name = {};
    /// One of the group's backends waits on streams.
    bool has_streams = false;
  };

  /// The key that each rank's report lies under; set before any rank makes its monitor, so that
  /// one request can read them all. A report is an address, a WaitPoint and the count of
  /// attempts, with tabs between.
  static std::string report_key(int rank);

  explicit GroupMonitor(Setup setup);
  ~GroupMonitor();
  GroupMonitor(const GroupMonitor&) = delete;
  GroupMonitor& operator=(const GroupMonitor&) = delete;

  /// Waits on the host until `work` is over.
  ///
  /// \throws c10::DistBackendError  when it fails, the group has failed, or the group's timeout is
  ///         over; the group is aborted then.
  void wait(c10d::Work& work, WaitPoint where, Peers peers = Peers::All);

  /// The same where the end of `work` is a matter of the current stream: the host waits for
  /// nothing.
  void wait_on_stream(c10d::Work& work, WaitPoint where);

  /// Waits on the host until `is_over`, which nothing wakes, as the end of work on a device.
  void poll(c10::function_ref<bool()> is_over, WaitPoint where, Peers peers = Peers::All);

  /// Waits until `wait` says so, which waits itself for at most the time that it is given.
  void wait_until(
      c10::function_ref<bool(std::chrono::milliseconds)> wait, WaitPoint where,
      Peers peers = Peers::All);

  /// Runs `step`, of which other ranks run their part: what it throws is a failure of the group.
  void abort_on_error(WaitPoint doing, c10::function_ref<void()> step);

  /// Records why this rank does not go on, and aborts the group. Nothing in a group of one.
  ///
  /// \return why the group failed: `why`, or what another rank recorded before.
  std::string fail(const std::string& why) noexcept;

  /// Why the group is aborted, if it is.
  std::optional<std::string> aborted() const;
  /// \throws c10::DistBackendError  when the group is aborted.
  void check() const;

  /// This rank begins a forward pass that others begin as well.
  void begin_attempt();
  /// An averaged backward pass ends. All ranks count attempts anew from there, for they may have
  /// had different numbers of forward passes before it (a join).
  void end_attempts();
  /// That pass threw. A rank that waits for this one fails, unless its own attempt of that number
  /// failed as well: then all may go on to the next.
  void fail_attempt(const std::string& why) noexcept;
  /// What threw on this rank without harm to the others, for the text of leave_by_exception().
  void note_error(const std::string& why) noexcept;

  /// This rank throws now, and so does every other rank: the end of this rank's part in the group
  /// is news to none of them.
  void note_agreed_error();
  /// Throws `text`, which every rank throws now.
  [[noreturn]] void throw_agreed(const std::string& text);

  /// This rank ends its part in the group while an exception unwinds the stack.
  void leave_by_exception() noexcept;
  /// Where the group has failed and its store goes with this process: waits until the other ranks
  /// have read why, or have ended, for at most two seconds.
  void outlast_readers() noexcept;

  int rank() const { return setup_.rank; }
  int size() const { return setup_.size; }
  /// "rank 1 of 3".
  std::string rank_text() const;

 private:
  struct Known;
  class LateWait;
  /// What a rank reported.
  struct Waiting {
    std::string where;  // "": it does not wait
    uint64_t attempts = 0;
  };

  StoreExecutor& executor();
  static void read_failure(Known& known, c10d::Store& store, int rank);
  using Question = std::function<std::optional<std::string>(c10d::Store&)>;
  Question comparison(const std::string& where) const;
  std::optional<std::string> look(
      std::chrono::milliseconds at_most,
      const std::optional<std::string>& compare_in = std::nullopt);
  std::optional<std::string> failure_for_this_rank() const;
  void report(const std::string& where);
  std::vector<Waiting> waiting_ranks();
  static std::string uneven_forwards(const std::vector<Waiting>& waiting);
  std::string with_arrivals(const std::string& what, const std::string& where);
  std::vector<int> find_gone(std::chrono::milliseconds at_most);
  std::string gone_ranks(std::chrono::milliseconds at_most);
  std::string silent_ranks() const;
  std::optional<std::string> last_words();
  std::chrono::milliseconds store_patience() const;
  std::string silent_store() const;
  std::string explain(const std::string& what, WaitPoint where);
  [[noreturn]] void throw_failed(const std::exception_ptr& cause, WaitPoint where);
  [[noreturn]] void throw_aborted(const std::string& why);
  bool is_watching() const;

  const Setup setup_;
  const OwnerProcess owner_;
  const std::shared_ptr<Known> known_;     // shared with jobs that may outlive this
  std::atomic<bool> host_is_gone_{false};  // of the store; as the last probe found
  mutable std::mutex mutex_;               // guards what follows
  std::unique_ptr<StoreExecutor> executor_;
  std::optional<std::string> aborted_;
  uint64_t attempts_ = 0;
  std::vector<uint64_t> failed_attempts_;
  std::string last_error_;
  bool last_error_is_agreed_ = false;
};

/// The monitor of a group that this library made; a new one for any other group, which every rank
/// has to ask for in the same order. The group outlives it.
std::shared_ptr<GroupMonitor> monitor_of(const ProcessGroup& group);

}  // namespace ddp
