#include <ddp/internal/group_monitor.h>

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "monitor/flight_record.h"
#include "monitor/job_monitor.h"
#include "monitor/late_waits.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a rank waits for a collective before it checks whether the group has failed, and between
// two such checks.
constexpr milliseconds kWaitSlice{500};
// When a waiting rank first reports where it waits, and probes its peers.
constexpr milliseconds kFirstReport{2000};
// A peer that has exited may have sent data that this rank still receives.
constexpr milliseconds kGoneGrace{1500};
// Added to the timeout, after which backends end their collectives themselves.
constexpr milliseconds kTimeoutGrace{5000};
// How often a wait polls a collective on a device, which cannot wake it.
constexpr std::chrono::microseconds kPollEvery{50};

constexpr const char* kAborted =
    ". The process group is aborted: end the job, or make a new process group and wrapper.";
// In a group that was made of another one, which is aborted too.
constexpr const char* kJobAborted =
    ". All process groups of the job are aborted: end the job, or destroy them and call "
    "init_process_group again.";

/// Removes the full stop of a backend's sentence, because the text continues.
std::string without_full_stop(std::string text) {
  while (!text.empty() && text.back() == '.') text.pop_back();
  return text;
}

/// Whether no peer can have caused `error`: a collective that fails because of a peer throws c10d's
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

GroupMonitor::GroupMonitor(Setup setup)
    : number_in_job_(setup.job->add(std::exchange(setup.abort_backends, nullptr))),
      setup_(std::move(setup)),
      store_(
          setup_.job->store() ? c10::make_intrusive<c10d::PrefixStore>(
                                    ddp::str("group", setup_.key), setup_.job->store())
                              : nullptr) {
  if (setup_.calls && setup_.size > 1) setup_.job->late_waits().add_group(setup_.key, setup_.calls);
}

GroupMonitor::~GroupMonitor() { setup_.job->remove(number_in_job_); }

int GroupMonitor::job_rank(int rank) const {
  return setup_.job_ranks.empty() ? rank : setup_.job_ranks[static_cast<size_t>(rank)];
}

std::string GroupMonitor::rank_text() const {
  const auto& job = *setup_.job;
  const auto in_job = ddp::str("rank ", job.rank(), " of ", job.size());
  if (!setup_.coordinate.empty()) return ddp::str(in_job, " (", setup_.coordinate, ")");
  if (setup_.size == job.size()) return in_job;
  return ddp::str(in_job, " (rank ", setup_.rank, " of ", setup_.group_name, ")");
}

// A process that this rank forked is not a rank, and no rank waits for it.
bool GroupMonitor::is_watching() const { return setup_.size > 1 && setup_.job->is_rank(); }

/// A wait that has lasted longer than kWaitSlice.
class GroupMonitor::LateWait {
 public:
  LateWait(GroupMonitor& monitor, WaitPoint where, Peers peers, const c10d::Work* work)
      : monitor_(monitor), where_(where), peers_(peers), work_(work) {}
  ~LateWait() {
    if (!reported_ || monitor_.aborted()) return;  // other ranks may still read the report
    auto& job = *monitor_.setup_.job;
    job.late_waits().end(*reported_);
    try {
      job.publish_waits();
    } catch (const std::exception&) {
      // A thread cannot start: the report stays, and may appear in a later error's text.
    }
  }
  LateWait(const LateWait&) = delete;
  LateWait& operator=(const LateWait&) = delete;

  /// Checks the group, the timeout and the peers, and reports where this rank waits.
  ///
  /// \throws c10::DistBackendError  if waiting longer is useless.
  void check_group() {
    monitor_.check();
    const auto waited = Clock::now() - begin_;
    const auto compare_in =
        waited >= next_probe_ ? std::optional<std::string>(where_()) : std::nullopt;
    if (compare_in && !reported_) reported_ = monitor_.begin_late_wait(*compare_in, work_);
    auto comparison = compare_in ? monitor_.make_comparison(*compare_in) : nullptr;
    auto& job = *monitor_.setup_.job;
    if (const auto failure = job.request_failure(kAnswerTimeout, std::move(comparison))) {
      monitor_.throw_aborted(*failure);
    }
    if (waited >= monitor_.setup_.timeout + kTimeoutGrace) {
      monitor_.throw_failed(
          backend_error(ddp::str("timed out after ", monitor_.setup_.timeout.count(), " ms")),
          where_);
    }
    if (waited < next_probe_) return;
    next_probe_ *= 2;
    if (peers_ == Peers::Some) return;
    const auto gone = monitor_.describe_gone_ranks(kProbeTimeout);
    if (gone.empty()) {
      gone_.clear();
    } else if (gone == gone_) {
      const auto failure = job.failure_after_exit();
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
  const c10d::Work* const work_;
  const Clock::time_point begin_ = Clock::now() - kWaitSlice;
  milliseconds next_probe_ = kFirstReport;
  std::optional<uint64_t> reported_;  // the number in LateWaits
  std::string gone_;                  // the result of the last probe
};

void GroupMonitor::wait_until(
    c10::function_ref<bool(milliseconds)> wait, WaitPoint where, Peers peers,
    const c10d::Work* work) {
  if (wait(kWaitSlice)) return;
  if (!is_watching()) {
    while (!wait(kWaitSlice)) {
    }
    return;
  }
  LateWait late(*this, where, peers, work);
  do {
    late.check_group();
  } while (!wait(kWaitSlice));
}

void GroupMonitor::poll(
    c10::function_ref<bool()> is_over, WaitPoint where, Peers peers, const c10d::Work* work) {
  wait_until(
      [&](milliseconds at_most) {
        const auto end = Clock::now() + at_most;
        while (!is_over()) {
          if (Clock::now() >= end) return false;
          std::this_thread::sleep_for(kPollEvery);
        }
        return true;
      },
      where, peers, work);
}

void GroupMonitor::wait(c10d::Work& work, WaitPoint where, Peers peers) {
  if (setup_.has_streams) {
    // NCCL's wait() with a limit aborts the communicator when the limit has passed.
    poll([&] { return work.isCompleted(); }, where, peers, &work);
    return wait_on_stream(work, where);
  }
  // Some handles are complete only once a wait() has returned, and never if it throws. A wait()
  // also throws when its time is over; one that throws long before that has failed.
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
  wait_until(is_over, where, peers, &work);
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
    check();  // throws the recorded text if a wait in `step` has failed the group
    throw_failed(std::current_exception(), doing);
  }
}

void GroupMonitor::throw_failed(const std::exception_ptr& cause, WaitPoint where) {
  // The backend's text numbers the ranks of the group.
  const auto in_group =
      setup_.coordinate.empty() ? "" : ddp::str(", rank ", setup_.rank, " of ", setup_.group_name);
  const auto what = without_full_stop(
      ddp::str(where(), " failed on ", rank_text(), in_group, ": ", text_of(cause)));
  DDP_CHECK_WITH(DistBackendError, is_watching(), what);
  throw_aborted(is_local(cause) ? what : describe_failure(what, where));
}

void GroupMonitor::throw_aborted(const std::string& why) {
  fail(why);
  check();
  DDP_CHECK_WITH(DistBackendError, false, why, kAborted);  // fail() did nothing
}

std::string GroupMonitor::fail(const std::string& why) noexcept {
  return is_watching() ? setup_.job->fail(without_full_stop(why)) : why;
}

FlightRecord GroupMonitor::flight_record() const {
  FlightRecord record{setup_.group_name, setup_.rank, setup_.size, setup_.coordinate};
  if (setup_.calls) {
    for (const auto lane : CallHistory::kLanes) record.lanes.push_back(setup_.calls->read(lane));
  }
  record.failure = setup_.job->failure();
  return record;
}

std::optional<std::string> GroupMonitor::aborted() const {
  const auto failure = setup_.job->failure();
  if (!failure) return std::nullopt;
  return *failure + (setup_.size == setup_.job->size() ? kAborted : kJobAborted);
}

void GroupMonitor::check() const {
  const auto why = aborted();
  DDP_CHECK_WITH(DistBackendError, !why, *why);
}

void GroupMonitor::note_error(const std::string& why) noexcept { setup_.job->note_error(why); }

void GroupMonitor::clear_error() { setup_.job->clear_error(); }

void GroupMonitor::throw_agreed(const std::string& text) {
  setup_.job->note_agreed_error(job_ranks());
  throw readable_error<AgreedError>(DDP_HERE, text);
}

void GroupMonitor::leave_by_exception() noexcept {
  if (!is_watching()) return;
  try {
    auto why = setup_.job->reason_to_leave(job_ranks());
    if (!why) return;
    if (why->empty()) {
      why = ddp::str(
          "an exception in the program of ", rank_text(), " ended its part in the training");
    }
    fail(*why);
  } catch (const std::exception&) {
  }
}

void GroupMonitor::leave_job() noexcept {
  setup_.job->remove(number_in_job_);
  if (setup_.size > 1) setup_.job->wait_until_failure_is_read();
}

}  // namespace ddp
