#include "monitor/waits/late_wait.h"

#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

#include "monitor/waits/late_waits.h"

namespace ddp {
namespace {

using namespace monitor;

// A peer that has exited may have sent data that this rank still receives, and so may one that has
// failed.
constexpr milliseconds kGoneGrace{1500};
constexpr milliseconds kFailedGrace{50};
// Added to the timeout, after which backends end their collectives themselves.
constexpr milliseconds kTimeoutGrace{5000};

}  // namespace

GroupMonitor::LateWait::LateWait(
    GroupMonitor& monitor, WaitPoint where, Peers peers, const c10d::Work* work)
    : monitor_(monitor),
      where_(where),
      peers_(peers),
      work_(work),
      begin_(Clock::now() - kWaitSlice),
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
  const auto waited = Clock::now() - begin_;
  const auto compare_in =
      waited >= next_probe_ ? std::optional<std::string>(where_()) : std::nullopt;
  if (compare_in && !reported_) reported_ = monitor_.begin_late_wait(*compare_in, work_);
  auto comparison = compare_in ? monitor_.make_comparison(*compare_in) : nullptr;
  auto& job = *monitor_.setup_.job;
  if (const auto failure = job.request_failure(kAnswerTimeout, std::move(comparison))) {
    if (wait(kFailedGrace)) return true;
    monitor_.throw_aborted(*failure);
  }
  if (waited >= monitor_.setup_.timeout + kTimeoutGrace) {
    monitor_.throw_failed(
        backend_error(ddp::str("timed out after ", monitor_.setup_.timeout.count(), " ms")),
        where_);
  }
  if (waited < next_probe_) return false;
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
    next_probe_ = std::chrono::duration_cast<milliseconds>(waited) + kGoneGrace;
  }
  return false;
}

}  // namespace ddp
