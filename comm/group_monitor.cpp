#include <ddp/internal/group_monitor.h>

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

#include "bounded_store.h"
#include "group_monitor_known.h"
#include "store_executor.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a rank waits for a collective before it looks whether the group has failed.
constexpr milliseconds kPatience{500};
// When a waiting rank first says where it waits, and probes its peers.
constexpr milliseconds kFirstReport{2000};
// A peer that is gone may have sent what this rank still receives.
constexpr milliseconds kGoneGrace{1500};
// Backends end their collectives themselves when the timeout is over; this is behind that.
constexpr milliseconds kTimeoutGrace{5000};
// Attempts are numbered by averaged passes, and within them; more than this many have no reason.
constexpr uint64_t kAttemptsOfPass = uint64_t{1} << 20;
// How often a wait looks whether a collective on a device is over, which cannot wake it.
constexpr std::chrono::microseconds kPollEvery{50};

constexpr const char* kAborted =
    ". The process group is aborted: end the job, or make a new process group and wrapper.";

/// Of a backend's whole sentence, which goes on here.
std::string without_full_stop(std::string text) {
  while (!text.empty() && text.back() == '.') text.pop_back();
  return text;
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

std::string GroupMonitor::report_key(int rank) { return ddp::str("report/", rank); }

GroupMonitor::GroupMonitor(Setup setup)
    : setup_(std::move(setup)), known_(std::make_shared<Known>()) {}

GroupMonitor::~GroupMonitor() = default;

std::string GroupMonitor::rank_text() const {
  return ddp::str("rank ", setup_.rank, " of ", setup_.size);
}

// A process that this rank forked is no rank, and nobody waits for it.
bool GroupMonitor::is_watching() const { return setup_.size > 1 && owner_.is_this_one(); }

StoreExecutor& GroupMonitor::executor() {
  const std::lock_guard lock(mutex_);
  if (!executor_) executor_ = std::make_unique<StoreExecutor>(setup_.store);
  return *executor_;
}

/// Reads the group's failure, on the store's thread.
void GroupMonitor::read_failure(Known& known, c10d::Store& store, int rank) {
  std::optional<std::string> failure;
  std::unique_lock lock(known.mutex);
  auto attempts = known.attempts;
  const auto compare = std::exchange(known.compare, nullptr);
  lock.unlock();
  std::string silence;
  try {
    failure = ddp::read_failure(store);
    if (!failure && compare) failure = compare(store);
    failure ? record_reader(store, rank) : read_attempts(store, attempts);
  } catch (const SilentStoreError& error) {
    silence = text_of(error);
  } catch (const std::exception&) {
    // The process that hosts the store has ended: probing the peers tells.
  }
  lock.lock();
  known.silence = silence;
  if (failure) known.failure = failure;
  known.attempts = std::move(attempts);
  known.asked = false;
  known.answered.notify_all();
}

/// Asks the store for the group's failure, if no question is under way, and waits a little for the
/// answer.
///
/// \param compare_in  where this rank waits, if it shall compare its calls with the other ranks':
///        with this question, or with the next one.
/// \return what concerns this rank of what is known then.
std::optional<std::string> GroupMonitor::look(
    milliseconds at_most, const std::optional<std::string>& compare_in) {
  if (!setup_.store) return std::nullopt;
  auto compare = compare_in && setup_.calls ? comparison(*compare_in) : Question();
  bool is_new = false;
  {
    const std::lock_guard lock(known_->mutex);
    if (compare) known_->compare = std::move(compare);
    is_new = !known_->failure && !std::exchange(known_->asked, true);
    if (is_new) known_->asked_at = Clock::now();
  }
  if (is_new)
    executor().post([known = known_, rank = setup_.rank](c10d::Store& store) {
      read_failure(*known, store, rank);
    });
  {
    std::unique_lock lock(known_->mutex);
    known_->answered.wait_for(lock, at_most, [this] { return !known_->asked; });
  }
  return failure_for_this_rank();
}

std::optional<std::string> GroupMonitor::failure_for_this_rank() const {
  const std::scoped_lock lock(known_->mutex, mutex_);
  if (known_->failure) return known_->failure;
  for (const auto& attempt : known_->attempts) {
    const bool is_coming = attempt.number > attempts_;
    const bool failed_here =
        std::find(failed_attempts_.begin(), failed_attempts_.end(), attempt.number) !=
        failed_attempts_.end();
    if (!is_coming && !failed_here) return attempt.why;
  }
  return std::nullopt;
}

/// A wait that has lasted longer than kPatience.
class GroupMonitor::LateWait {
 public:
  LateWait(GroupMonitor& monitor, WaitPoint where, Peers peers)
      : monitor_(monitor), where_(where), peers_(peers) {}
  ~LateWait() {
    if (!reported_ || monitor_.aborted()) return;  // the others may be about to read it
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
    const auto waited = Clock::now() - begin_;
    const auto compare_in =
        waited >= next_probe_ ? std::optional<std::string>(where_()) : std::nullopt;
    if (const auto failure = monitor_.look(kAnswerPatience, compare_in)) {
      monitor_.throw_aborted(*failure);
    }
    if (waited >= monitor_.setup_.timeout + kTimeoutGrace) {
      monitor_.throw_failed(
          backend_error(ddp::str("timed out after ", monitor_.setup_.timeout.count(), " ms")),
          where_);
    }
    if (waited < next_probe_) return;
    next_probe_ *= 2;
    if (!std::exchange(reported_, true)) monitor_.report(where_());
    if (peers_ == Peers::Some) return;
    const auto gone = monitor_.gone_ranks(kProbe);
    if (gone.empty()) {
      gone_.clear();
    } else if (gone == gone_) {
      const auto failure = monitor_.last_words();
      monitor_.throw_aborted(
          failure.value_or(ddp::str(where_(), " failed on ", monitor_.rank_text(), ": ", gone)));
    } else {
      gone_ = gone;
      next_probe_ = std::chrono::duration_cast<milliseconds>(waited) + kGoneGrace;
    }
  }

 private:
  GroupMonitor& monitor_;
  WaitPoint where_;
  const Peers peers_;
  const Clock::time_point begin_ = Clock::now() - kPatience;
  milliseconds next_probe_ = kFirstReport;
  bool reported_ = false;
  std::string gone_;  // as the last probe found
};

void GroupMonitor::wait_until(
    c10::function_ref<bool(milliseconds)> wait, WaitPoint where, Peers peers) {
  if (wait(kPatience)) return;
  if (!is_watching()) {
    while (!wait(kPatience)) {
    }
    return;
  }
  LateWait late(*this, where, peers);
  do {
    late.look();
  } while (!wait(kPatience));
}

void GroupMonitor::poll(c10::function_ref<bool()> is_over, WaitPoint where, Peers peers) {
  wait_until(
      [&](milliseconds at_most) {
        const auto end = Clock::now() + at_most;
        while (!is_over()) {
          if (Clock::now() >= end) return false;
          std::this_thread::sleep_for(kPollEvery);
        }
        return true;
      },
      where, peers);
}

void GroupMonitor::wait(c10d::Work& work, WaitPoint where, Peers peers) {
  if (setup_.has_streams) {
    // NCCL's wait() with a limit aborts the communicator when the limit is over.
    poll([&] { return work.isCompleted(); }, where, peers);
    return wait_on_stream(work, where);
  }
  // Some handles are complete only once a wait() has returned, and never where it throws. A wait()
  // throws when its time is over, too; one that throws long before has failed.
  bool succeeded = false;
  std::exception_ptr failure;
  const auto is_over = [&](milliseconds at_most) {
    if (work.isCompleted()) return true;
    const auto begin = Clock::now();
    try {
      succeeded = work.wait(at_most);
    } catch (...) {
      if (Clock::now() - begin < at_most / 2) failure = std::current_exception();
    }
    return succeeded || failure || work.isCompleted();
  };
  wait_until(is_over, where, peers);
  if (failure) throw_failed(failure, where);
  if (!succeeded) wait_on_stream(work, where);
}

void GroupMonitor::wait_on_stream(c10d::Work& work, WaitPoint where) {
  try {
    work.wait();
  } catch (...) {
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
  const auto what =
      without_full_stop(ddp::str(where(), " failed on ", rank_text(), ": ", text_of(cause)));
  DDP_CHECK_WITH(DistBackendError, is_watching(), what);
  throw_aborted(is_local(cause) ? what : explain(what, where));
}

void GroupMonitor::throw_aborted(const std::string& why) {
  fail(why);
  check();
  DDP_CHECK_WITH(DistBackendError, false, why, kAborted);
}

std::string GroupMonitor::fail(const std::string& why) noexcept {
  if (!is_watching()) return why;
  auto stands = without_full_stop(why);
  try {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return *aborted_;
    }
    if (setup_.store) {
      // compareSet answers with what stands afterwards.
      const auto recorded = executor().ask<std::string>(
          [stands, rank = setup_.rank](c10d::Store& store) {
            auto recorded = record_failure(store, stands);
            record_reader(store, rank);
            return recorded;
          },
          store_patience());
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
  DDP_CHECK_WITH(DistBackendError, !why, *why);
}

void GroupMonitor::begin_attempt() {
  const std::lock_guard lock(mutex_);
  ++attempts_;
  last_error_.clear();
  last_error_is_agreed_ = false;
}

void GroupMonitor::end_attempts() {
  const std::lock_guard lock(mutex_);
  attempts_ = (attempts_ / kAttemptsOfPass + 1) * kAttemptsOfPass;
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
    executor().post([attempt](c10d::Store& store) { record_attempt(store, attempt); });
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

void GroupMonitor::note_agreed_error() {
  const std::lock_guard lock(mutex_);
  last_error_is_agreed_ = true;
}

void GroupMonitor::throw_agreed(const std::string& text) {
  note_agreed_error();
  throw readable_error<AgreedError>(DDP_HERE, text);
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
      why = ddp::str(
          "an exception in the program of ", rank_text(), " ended its part in the training");
    }
    fail(why);
  } catch (const std::exception&) {
  }
}

void GroupMonitor::outlast_readers() noexcept {
  if (!is_watching() || setup_.rank != setup_.store_host || !setup_.store) return;
  try {
    if (!aborted()) return;
    const auto end = Clock::now() + kStorePatience;
    while (Clock::now() < end) {
      std::vector<int> others;
      const auto gone = find_gone(kProbe);
      for (int rank = 0; rank < setup_.size; ++rank) {
        if (std::find(gone.begin(), gone.end(), rank) == gone.end()) others.push_back(rank);
      }
      const auto all = executor().ask<bool>(
          [others](c10d::Store& store) { return have_read(store, others); }, kStorePatience);
      if (all.value_or(true)) return;
      std::this_thread::sleep_for(kBetweenLooks);
    }
  } catch (const std::exception&) {
  }
}

}  // namespace ddp
