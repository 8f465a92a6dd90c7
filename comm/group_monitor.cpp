#include <ddp/internal/group_monitor.h>

#include <algorithm>
#include <condition_variable>
#include <new>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/error_text.h>

#include "bounded_store.h"
#include "failed_attempt.h"
#include "presence.h"
#include "store_executor.h"

namespace ddp {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long a rank waits for a collective before it looks whether the group has failed.
constexpr milliseconds kPatience{500};
// How long a waiting rank stays with the store's thread for its answer.
constexpr milliseconds kAnswerPatience{100};
// How long a rank in trouble does.
constexpr milliseconds kStorePatience{2000};
// When a waiting rank first says where it waits, and probes its peers.
constexpr milliseconds kFirstReport{2000};
// A peer that is gone may have sent what this rank still receives.
constexpr milliseconds kGoneGrace{1500};
// How long a rank whose collective broke looks for the reason, which may be about to be written.
constexpr milliseconds kReasonPatience{3000};
constexpr milliseconds kBetweenLooks{50};
constexpr milliseconds kProbe{300};
// Backends end their collectives themselves when the timeout is over; this is behind that.
constexpr milliseconds kTimeoutGrace{5000};
// How often a wait looks whether a collective on a device is over, which cannot wake it.
constexpr std::chrono::microseconds kPollEvery{50};

constexpr const char* kFailure = "failure";
constexpr const char* kAttempt = "attempt";
constexpr const char* kReaders = "readers";
constexpr const char* kAborted =
    ". The process group is aborted: end the job, or make a new process group and wrapper.";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of_bytes(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string list(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

/// Whether no peer has a part in `error`: a collective that fails for a peer's sake throws c10d's
/// errors, or those of a backend's library.
bool is_local(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistError&) {
    return false;
  } catch (const c10::Error&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

/// What the store said last.
struct GroupMonitor::Known {
  std::mutex mutex;  // guards what follows
  std::condition_variable answered;
  std::optional<std::string> failure;
  std::optional<FailedAttempt> attempt;
  bool asked = false;  // and not answered yet
  Clock::time_point asked_at{};
  std::string silence;  // what the store's own limit said when it did not answer
};

std::string GroupMonitor::report_key(int rank) { return c10::str("report/", rank); }

GroupMonitor::GroupMonitor(Setup setup)
    : setup_(std::move(setup)), known_(std::make_shared<Known>()) {}

GroupMonitor::~GroupMonitor() = default;

std::string GroupMonitor::rank_text() const {
  return c10::str("rank ", setup_.rank, " of ", setup_.size);
}

StoreExecutor& GroupMonitor::executor() {
  const std::lock_guard lock(mutex_);
  if (!executor_) executor_ = std::make_unique<StoreExecutor>(setup_.store);
  return *executor_;
}

/// Reads the group's failure, on the store's thread.
void GroupMonitor::read_failure(Known& known, c10d::Store& store) {
  std::optional<std::string> failure;
  std::optional<FailedAttempt> attempt;
  std::string silence;
  try {
    if (store.check({kFailure})) {
      failure = text_of_bytes(store.get(kFailure));
      store.add(kReaders, 1);
    } else if (store.check({kAttempt})) {
      attempt = parse_attempt(text_of_bytes(store.get(kAttempt)));
    }
  } catch (const SilentStoreError& error) {
    silence = text_of(error);
  } catch (const std::exception&) {
    // The process that hosts the store has ended: probing the peers tells.
  }
  const std::lock_guard lock(known.mutex);
  known.silence = silence;
  if (failure) known.failure = failure;
  if (attempt) known.attempt = attempt;
  known.asked = false;
  known.answered.notify_all();
}

/// Asks the store for the group's failure, if no question is under way, and waits a little for the
/// answer.
///
/// \return what concerns this rank of what is known then.
std::optional<std::string> GroupMonitor::look(milliseconds at_most) {
  if (!setup_.store) return std::nullopt;
  bool is_new = false;
  {
    const std::lock_guard lock(known_->mutex);
    is_new = !known_->failure && !std::exchange(known_->asked, true);
    if (is_new) known_->asked_at = Clock::now();
  }
  if (is_new)
    executor().post([known = known_](c10d::Store& store) { read_failure(*known, store); });
  {
    std::unique_lock lock(known_->mutex);
    known_->answered.wait_for(lock, at_most, [this] { return !known_->asked; });
  }
  return failure_for_this_rank();
}

std::optional<std::string> GroupMonitor::failure_for_this_rank() const {
  std::optional<std::string> failure;
  std::optional<FailedAttempt> attempt;
  {
    const std::lock_guard lock(known_->mutex);
    failure = known_->failure;
    attempt = known_->attempt;
  }
  if (failure || !attempt) return failure;
  const std::lock_guard lock(mutex_);
  const bool is_coming = attempt->number > attempts_;
  const bool failed_here =
      std::find(failed_attempts_.begin(), failed_attempts_.end(), attempt->number) !=
      failed_attempts_.end();
  if (is_coming || failed_here) return std::nullopt;
  return attempt->why;
}

void GroupMonitor::report(const std::string& where) {
  if (!setup_.store) return;
  const auto rank = static_cast<size_t>(setup_.rank);
  const auto address = rank < setup_.addresses.size() ? setup_.addresses[rank] : "";
  executor().post([key = report_key(setup_.rank), text = address + '\t' + where](auto& store) {
    store.set(key, bytes_of(text));
  });
}

/// Which ranks wait where this one does, and where the others do; "" when the store does not say.
std::string GroupMonitor::arrivals(const std::string& where) {
  if (!setup_.store) return "";
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup_.size; ++rank) keys.push_back(report_key(rank));
  std::vector<std::string> reports;
  try {
    const auto question = [keys](c10d::Store& store) {
      std::vector<std::string> texts;
      for (const auto& value : store.multiGet(keys)) texts.push_back(text_of_bytes(value));
      return texts;
    };
    reports = executor().ask<std::vector<std::string>>(question, kStorePatience).value_or(reports);
  } catch (const std::exception&) {
  }
  if (reports.size() != keys.size()) return "";
  std::vector<int> here, elsewhere;
  std::string others;
  for (int rank = 0; rank < setup_.size; ++rank) {
    const auto& text = reports[static_cast<size_t>(rank)];
    const auto place = text.substr(std::min(text.find('\t'), text.size() - 1) + 1);
    (place == where ? here : elsewhere).push_back(rank);
    if (place != where && !place.empty()) others += c10::str("; rank ", rank, " waits in ", place);
  }
  if (elsewhere.empty()) return "; all ranks had arrived";
  return c10::str("; ", list(here), " had arrived, ", list(elsewhere), " had not", others);
}

/// The peers whose processes ended, or left the group: "rank 1 of 3 has ended"; "" for none.
std::string GroupMonitor::gone_ranks() const {
  if (setup_.addresses.empty()) return "";
  setup_.presence->drain();
  const auto found = probe(setup_.addresses, kProbe);
  std::vector<int> gone;
  for (int rank = 0; rank < setup_.size; ++rank) {
    if (rank != setup_.rank && found[static_cast<size_t>(rank)] == Presence::Gone) {
      gone.push_back(rank);
    }
  }
  if (gone.empty()) return "";
  const bool hosts = std::find(gone.begin(), gone.end(), setup_.store_host) != gone.end();
  return c10::str(
      list(gone), " of ", setup_.size, gone.size() == 1 ? " has" : " have",
      " ended, or left the process group",
      hosts ? c10::str(" (rank ", setup_.store_host, " hosts the store)") : "");
}

/// That the store does not answer, and who hosts it; "" when it does.
std::string GroupMonitor::silent_store() const {
  if (!setup_.store) return "";
  const std::lock_guard lock(known_->mutex);
  if (!known_->silence.empty()) return known_->silence;
  const auto waited =
      std::chrono::duration_cast<milliseconds>(Clock::now() - known_->asked_at).count();
  if (!known_->asked || waited < kStorePatience.count()) return "";
  const auto host = setup_.store_host < 0 ? std::string()
                                          : c10::str(", which rank ", setup_.store_host, " hosts,");
  return c10::str(
      "the store", host, " has not answered for ", waited,
      " ms: the process that hosts it is stopped, or cannot be reached");
}

/// The text of a failure of this rank: what another rank recorded before, or `what` with what can
/// be found out about the peers. Stays for a while, since a rank that fails may be about to say so.
std::string GroupMonitor::explain(const std::string& what, WaitPoint where) {
  const auto end = Clock::now() + std::min(kReasonPatience, setup_.timeout);
  report(where());  // for the others' texts, if they find no reason either
  std::string gone;
  while (true) {
    if (auto failure = look(kStorePatience)) return *failure;
    // In this order: a rank that fails says so before it goes.
    if (!gone.empty()) return c10::str(what, "; ", gone);
    gone = gone_ranks();
    if (!gone.empty()) continue;
    if (auto silent = silent_store(); !silent.empty()) return c10::str(what, "; ", silent);
    if (!setup_.store || Clock::now() >= end) return what + arrivals(where());
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

/// A wait that has lasted longer than kPatience.
class GroupMonitor::LateWait {
 public:
  LateWait(GroupMonitor& monitor, WaitPoint where) : monitor_(monitor), where_(where) {}
  ~LateWait() {
    if (!reported_) return;
    try {
      monitor_.report("");
    } catch (const std::exception&) {
      // No thread to be had: the report stays, and may appear in the text of a later error.
    }
  }
  LateWait(const LateWait&) = delete;
  LateWait& operator=(const LateWait&) = delete;

  /// \throws c10::DistBackendError  when there is no use in going on.
  void look() {
    monitor_.check();
    if (const auto failure = monitor_.look(kAnswerPatience)) monitor_.throw_aborted(*failure);
    const auto waited = Clock::now() - begin_;
    if (waited >= monitor_.setup_.timeout + kTimeoutGrace) {
      monitor_.throw_failed(
          backend_error(c10::str("timed out after ", monitor_.setup_.timeout.count(), " ms")),
          where_);
    }
    if (waited < next_probe_) return;
    next_probe_ *= 2;
    if (!std::exchange(reported_, true)) monitor_.report(where_());
    const auto gone = monitor_.gone_ranks();
    if (gone.empty()) {
      gone_.clear();
    } else if (gone == gone_) {
      const auto failure = monitor_.look(kStorePatience);
      monitor_.throw_aborted(
          failure.value_or(c10::str(where_(), " failed on ", monitor_.rank_text(), ": ", gone)));
    } else {
      gone_ = gone;
      next_probe_ = std::chrono::duration_cast<milliseconds>(waited) + kGoneGrace;
    }
  }

 private:
  GroupMonitor& monitor_;
  WaitPoint where_;
  const Clock::time_point begin_ = Clock::now() - kPatience;
  milliseconds next_probe_ = kFirstReport;
  bool reported_ = false;
  std::string gone_;  // as the last probe found
};

void GroupMonitor::wait_until(c10::function_ref<bool(milliseconds)> wait, WaitPoint where) {
  if (wait(kPatience)) return;
  if (!is_watching()) {
    while (!wait(kPatience)) {
    }
    return;
  }
  LateWait late(*this, where);
  do {
    late.look();
  } while (!wait(kPatience));
}

void GroupMonitor::poll(c10::function_ref<bool()> is_over, WaitPoint where) {
  wait_until(
      [&](milliseconds at_most) {
        const auto end = Clock::now() + at_most;
        while (!is_over()) {
          if (Clock::now() >= end) return false;
          std::this_thread::sleep_for(kPollEvery);
        }
        return true;
      },
      where);
}

void GroupMonitor::wait(c10d::Work& work, WaitPoint where) {
  bool succeeded = false;  // some handles are complete only once a wait() has returned
  const auto is_over = [&](milliseconds at_most) {
    if (work.isCompleted()) return true;
    try {
      succeeded = work.wait(at_most);
    } catch (const std::exception&) {
      // Late, or failed: the difference is whether it is over.
    }
    return succeeded || work.isCompleted();
  };
  wait_until(is_over, where);
  if (!succeeded) wait_on_stream(work, where);
}

void GroupMonitor::wait_on_stream(c10d::Work& work, WaitPoint where) {
  try {
    work.wait();
  } catch (const std::exception&) {
    throw_failed(std::current_exception(), where);
  }
}

void GroupMonitor::abort_on_error(WaitPoint doing, c10::function_ref<void()> step) {
  check();
  try {
    step();
  } catch (...) {
    check();  // with its text, if a wait in `step` has failed the group
    throw_failed(std::current_exception(), doing);
  }
}

void GroupMonitor::throw_failed(const std::exception_ptr& cause, WaitPoint where) {
  const auto what = c10::str(where(), " failed on ", rank_text(), ": ", text_of(cause));
  TORCH_CHECK_WITH(DistBackendError, is_watching(), what);
  throw_aborted(is_local(cause) ? what : explain(what, where));
}

void GroupMonitor::throw_aborted(const std::string& why) {
  fail(why);
  check();
  TORCH_CHECK_WITH(DistBackendError, false, why, kAborted);
}

std::string GroupMonitor::fail(const std::string& why) noexcept {
  if (!is_watching()) return why;
  auto stands = why;
  try {
    while (!stands.empty() && stands.back() == '.')
      stands.pop_back();  // a backend's whole sentence
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return *aborted_;
    }
    if (setup_.store) {
      // compareSet answers with what stands afterwards.
      const auto recorded = executor().ask<std::string>(
          [stands](c10d::Store& store) {
            return text_of_bytes(store.compareSet(kFailure, {}, bytes_of(stands)));
          },
          kStorePatience);
      stands = recorded.value_or(stands);
    }
  } catch (const std::exception&) {
    // A store that is gone: this rank's own words then.
  }
  try {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return *aborted_;
      aborted_ = stands;
    }
    if (setup_.abort_backends) setup_.abort_backends();
  } catch (const std::exception&) {
    // Of a backend of the user's own. Why the group failed matters more.
  }
  return stands;
}

std::optional<std::string> GroupMonitor::aborted() const {
  const std::lock_guard lock(mutex_);
  if (!aborted_) return std::nullopt;
  return *aborted_ + kAborted;
}

void GroupMonitor::check() const {
  const auto why = aborted();
  TORCH_CHECK_WITH(DistBackendError, !why, *why);
}

void GroupMonitor::begin_attempt() {
  const std::lock_guard lock(mutex_);
  ++attempts_;
  last_error_.clear();
  last_error_is_agreed_ = false;
}

void GroupMonitor::fail_attempt(const std::string& why) noexcept {
  note_error(why);
  if (!is_watching() || !setup_.store) return;
  try {
    FailedAttempt attempt{setup_.rank, 0, why};
    {
      const std::lock_guard lock(mutex_);
      attempt.number = attempts_;
      failed_attempts_.push_back(attempts_);
    }
    executor().post(
        [text = serialize(attempt)](auto& store) { store.set(kAttempt, bytes_of(text)); });
  } catch (const std::exception&) {
    // Out of memory: the others will find this rank gone, or wait for their timeout.
  }
}

void GroupMonitor::note_error(const std::string& why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    last_error_ = why;
  } catch (const std::exception&) {
  }
}

void GroupMonitor::throw_agreed(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    last_error_is_agreed_ = true;
  }
  throw AgreedError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

void GroupMonitor::leave_by_exception() noexcept {
  if (!is_watching()) return;
  try {
    std::string why;
    {
      const std::lock_guard lock(mutex_);
      if (aborted_ || last_error_is_agreed_) return;
      why = last_error_;
    }
    if (why.empty()) {
      why = c10::str(
          "an exception in the program of ", rank_text(), " ended its part in the training");
    }
    fail(why);
    if (setup_.rank != setup_.store_host) return;
    // The store goes with this process: the others read first, those that wait.
    const auto end = Clock::now() + kStorePatience;
    while (Clock::now() < end) {
      const auto readers = executor().ask<int64_t>(
          [](c10d::Store& store) { return store.add(kReaders, 0); }, kStorePatience);
      if (!readers || *readers >= setup_.size - 1) return;
      std::this_thread::sleep_for(kBetweenLooks);
    }
  } catch (const std::exception&) {
  }
}

}  // namespace ddp
