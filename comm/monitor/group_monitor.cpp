#include <ddp/internal/group_monitor.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "monitor/device_wait.h"
#include "monitor/flight_record.h"
#include "monitor/job_monitor.h"
#include "monitor/late_wait.h"
#include "monitor/late_waits.h"
#include "store/bounded_store.h"

namespace ddp {
namespace {

using namespace monitor;

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
  } catch (const std::logic_error&) {
    return true;  // a text that no rank of this version made
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
                              : nullptr),
      device_works_(std::make_unique<DeviceWorks>()) {
  if (setup_.calls && setup_.size > 1)
    setup_.job->late_waits().add_group(setup_.key, setup_.calls, job_ranks());
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

void GroupMonitor::wait_until(
    c10::function_ref<bool(milliseconds)> wait, WaitPoint where, Peers peers,
    const c10d::Work* work) {
  if (work) log_wait(work);
  const HostWait waited;
  if (wait(kWaitSlice)) return;
  DDP_CHECK(
      setup_.job->is_rank(), "process group: expected a wait in the process that made the group, ",
      "got one in a process that it forked. Wait before the fork, or in the process that forks.");
  if (setup_.size == 1) {
    while (!wait(kWaitSlice)) {
    }
    return;
  }
  LateWait late(*this, where, peers, work);
  do {
    if (late.check_group(wait)) return;
  } while (!wait(kWaitSlice));
}

void GroupMonitor::poll(
    c10::function_ref<bool()> is_over, WaitPoint where, Peers peers, const c10d::Work* work) {
  if (poll_at_pace(is_over, kPollEvery)) return check();
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
  // A backend that was aborted on another thread may call its collectives complete.
  check();
}

void GroupMonitor::wait(c10d::Work& work, WaitPoint where, Peers peers) {
  if (setup_.has_streams) {
    // NCCL's wait() with a limit aborts the communicator when the limit has passed.
    poll([&] { return work.isCompleted(); }, where, peers, &work);
    return wait_on_stream(work, where);
  }
  // Some handles are complete only once a wait() has returned, and never if it throws. A wait()
  // also throws when its time is over; one that throws long before that has failed. Errors are
  // thrown while a late wait is known as one.
  const auto is_over = [&](milliseconds at_most) {
    const auto begin = Clock::now();
    try {
      if (!work.isCompleted() && work.wait(at_most)) return true;
    } catch (...) {
      if (Clock::now() - begin < at_most / 2) throw_failed(std::current_exception(), where);
    }
    if (!work.isCompleted()) return false;
    wait_on_stream(work, where);
    return true;
  };
  wait_until(is_over, where, peers, &work);
}

void GroupMonitor::wait_on_stream(c10d::Work& work, WaitPoint where) {
  log_wait(&work);
  try {
    work.wait();
  } catch (...) {
    throw_failed(std::current_exception(), where);
  }
}

void GroupMonitor::abort_on_error(WaitPoint doing, c10::function_ref<void()> step) {
  check();
  try {
    const CallPlace place(doing);
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
  if (setup_.job->is_generation()) check();  // its end is the cause
  if (!is_watching()) {
    fail(what);
    DDP_CHECK_WITH(DistBackendError, false, what);
  }
  throw_aborted(is_local(cause) ? what : describe_failure(what, where));
}

void GroupMonitor::throw_aborted(const std::string& why) {
  fail(why);
  check();
  DDP_CHECK_WITH(DistBackendError, false, why, kAborted);  // fail() did nothing
}

std::string GroupMonitor::fail(const std::string& why) noexcept {
  const auto find_blamed = [this] { return blamed_ranks(); };
  auto* const log = CallLog::active();
  if (log && is_watching()) log->set_failure(why);
  if (is_watching()) return setup_.job->fail(without_full_stop(why), find_blamed);
  if (setup_.job->is_rank()) setup_.job->note_error(without_full_stop(why));
  return why;
}

bool GroupMonitor::job_has_others() const { return setup_.job->size() > 1; }

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
  if (setup_.job->is_generation()) return setup_.job->text_of_failure(*failure) + ".";
  return *failure + (setup_.size == setup_.job->size() ? kAborted : kJobAborted);
}

void GroupMonitor::check() const {
  if (const auto why = aborted()) setup_.job->throw_failure(*why);
}

int GroupMonitor::add_steps(const std::shared_ptr<SharedSteps>& steps) {
  const std::lock_guard lock(mutex_);
  drop_if(steps_, [](const auto& earlier) { return earlier.expired(); });
  steps_.push_back(steps);
  setup_.job->add_steps(steps, store_);
  return steps_added_++;
}

std::vector<std::shared_ptr<SharedSteps>> GroupMonitor::shared_steps() const {
  std::vector<std::shared_ptr<SharedSteps>> alive;
  const std::lock_guard lock(mutex_);
  for (const auto& steps : steps_) {
    if (auto one = steps.lock()) alive.push_back(std::move(one));
  }
  return alive;
}

uint64_t GroupMonitor::count_steps() const {
  uint64_t count = 0;
  for (const auto& steps : shared_steps()) count += steps->count();
  // Steps whose owner was destroyed count on, so that the sum does not fall.
  const std::lock_guard lock(mutex_);
  return most_steps_ = std::max(most_steps_, count);
}

void GroupMonitor::post(std::function<void(c10d::Store&)> call) {
  if (!is_watching() || !store_) return;
  setup_.job->executor().post(
      [call = std::move(call), of_group = store_](c10d::Store&) { call(*of_group); });
}

void GroupMonitor::add_settling(const std::shared_ptr<std::function<void()>>& settle) {
  setup_.job->add_settling(settle);
}

void GroupMonitor::settle_job() {
  for (const auto& settle : setup_.job->settlings()) (*settle)();
}

void GroupMonitor::note_error(const std::string& why) noexcept { setup_.job->note_error(why); }

void GroupMonitor::clear_error() { setup_.job->clear_error(); }

void GroupMonitor::throw_agreed(const std::string& text, const std::vector<int>& wrong_ranks) {
  setup_.job->note_agreed_error(job_ranks());
  if (!wrong_ranks.empty()) {
    auto error = readable_error<WrongRanks>(DDP_HERE, text);
    error.has_this_rank = contains(wrong_ranks, setup_.rank);
    throw error;
  }
  throw readable_error<AgreedError>(DDP_HERE, text);
}

void GroupMonitor::leave_by_exception() noexcept {
  // Ranks of other axes may wait for this one, although this axis is of one rank.
  const bool is_axis_of_one = setup_.size == 1 && !setup_.coordinate.empty();
  if (!setup_.job->is_rank() || !job_has_others()) return;
  if (setup_.size == 1 && !is_axis_of_one) return;
  try {
    const auto ranks = is_axis_of_one ? numbers_up_to(setup_.job->size()) : job_ranks();
    auto why = setup_.job->reason_to_leave(ranks);
    if (!why) return;
    if (why->empty()) {
      why = ddp::str(
          "an exception in the program of ", rank_text(), " ended its part in the training");
    }
    setup_.job->fail(without_full_stop(*why));
  } catch (const std::exception&) {
  }
}

void GroupMonitor::leave_job() noexcept {
  setup_.job->remove(number_in_job_);
  if (setup_.size > 1) setup_.job->wait_until_failure_is_read();
}

}  // namespace ddp
