#include "monitor/late_wait.h"

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "calls/call_history.h"
#include "monitor/late_waits.h"

namespace ddp {
namespace {

using namespace monitor;

// A peer that has exited may have sent data that this rank still receives, and so may one that has
// failed.
constexpr milliseconds kGoneGrace{1500};
constexpr milliseconds kFailedGrace{50};
// Added to the timeout, after which backends end their collectives themselves.
constexpr milliseconds kTimeoutGrace{5000};

using Kind = CollectiveKind;

// The rank of the group without whose call `rank` waits, or AwaitedCall::kAll. Nothing if `rank`
// may go on without the others.
std::optional<int> needed_rank(const CallHistory::Position& at, int rank) {
  const auto& [lane, _, call] = at;
  const bool is_root = call.root == rank;
  switch (call.kind) {
    case Kind::Broadcast:
    case Kind::Scatter:
      return is_root ? std::nullopt : std::optional<int>(call.root);
    case Kind::Reduce:
    case Kind::Gather:
      return is_root ? std::optional<int>(AwaitedCall::kAll) : std::nullopt;
    case Kind::AllToAll:
      // NCCL does not wait for a rank that sends nothing.
      return lane == CallHistory::Lane::kCpu ? std::optional<int>(AwaitedCall::kAll) : std::nullopt;
    default:
      return AwaitedCall::kAll;
  }
}

}  // namespace

/// \return  nothing if others than ranks that make calls may end the wait.
std::optional<AwaitedCall> GroupMonitor::awaited_call(
    const std::string& where, const c10d::Work* work) const {
  if (!setup_.calls || work == nullptr) return std::nullopt;
  const auto at = setup_.calls->find(work);
  const auto needed = at ? needed_rank(*at, setup_.rank) : std::nullopt;
  if (!needed) return std::nullopt;
  auto call = at->call;
  if (call.root >= 0) call.root = job_rank(call.root);
  const bool names_call = where == to_text(call.kind);
  return AwaitedCall{
      LateWaits::list_name(setup_.key, at->lane), at->number,
      *needed == AwaitedCall::kAll ? *needed : job_rank(*needed),
      ddp::str(
          rank_text(), " waits in call ", at->number, " of process group \"", setup_.group_name,
          "\" (", to_text(call), names_call ? "" : ", in " + where, ")")};
}

/// \param work  the handle that is waited for; null: unknown.
/// \param late_for  how long ago it could have been reported.
uint64_t GroupMonitor::begin_late_wait(
    const std::string& where, const c10d::Work* work, milliseconds late_for) {
  const auto steps = shared_steps();
  return setup_.job->late_waits().begin(
      {setup_.key, where, count_steps(), awaited_call(where, work), setup_.group_name,
       steps.empty() ? StepsText() : steps.front()->text()},
      late_for);
}

GroupMonitor::LateWait::LateWait(
    GroupMonitor& monitor, WaitPoint where, Peers peers, const c10d::Work* work,
    milliseconds waited)
    : monitor_(monitor),
      where_(where),
      peers_(peers),
      work_(work),
      begin_(Clock::now() - waited),
      next_probe_(kFirstReport) {}

GroupMonitor::LateWait::~LateWait() {
  if (!reported_ || monitor_.aborted()) return;  // other ranks may still read the report
  auto& job = *monitor_.setup_.job;
  job.late_waits().end(*reported_);
  try {
    job.publish_waits();
  } catch (const std::exception&) {
    // A thread cannot start: the report stays, and may appear in a later error's text.
  }
}

bool GroupMonitor::LateWait::check_group(c10::function_ref<bool(milliseconds)> wait) {
  monitor_.check();
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begin_);
  const bool is_due = waited >= next_probe_;
  if (is_due && !reported_) {
    reported_ = monitor_.begin_late_wait(where_(), work_, waited - kFirstReport);
  }
  auto& job = *monitor_.setup_.job;
  if (const auto failure = job.request_failure(kAnswerTimeout)) {
    if (wait(kFailedGrace)) return true;
    monitor_.throw_aborted(*failure);
  }
  if (waited >= monitor_.setup_.timeout + kTimeoutGrace) {
    monitor_.throw_failed(
        backend_error(ddp::str("timed out after ", monitor_.setup_.timeout.count(), " ms")),
        where_);
  }
  if (!is_due) return false;
  next_probe_ *= 2;
  if (peers_ == Peers::Some) return false;
  const auto gone = monitor_.describe_gone_ranks(kProbeTimeout);
  if (gone.empty()) {
    gone_.clear();
  } else if (gone == gone_) {
    const auto failure = job.failure_after_exit();
    monitor_.throw_aborted(
        failure.value_or(ddp::str(where_(), " failed on ", monitor_.rank_text(), ": ", gone)));
  } else {
    gone_ = gone;
    next_probe_ = waited + kGoneGrace;
  }
  return false;
}

}  // namespace ddp
