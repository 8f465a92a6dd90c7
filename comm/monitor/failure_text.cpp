// Finds out why a wait failed, from the other ranks' state.
#include <algorithm>
#include <thread>
#include <utility>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "monitor/device_wait.h"
#include "monitor/failure_records.h"
#include "monitor/job_monitor.h"
#include "monitor/late_wait.h"
#include "monitor/late_waits.h"
#include "monitor/rank_report.h"
#include "store/bounded_store.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a rank whose collective failed waits for the reason at most, which another rank may be
// about to write.
constexpr milliseconds kReasonTimeout{3000};

/// Whether a wait that failed had lasted about as long as the group's timeout.
///
/// \param reported_for  how long ago the rank reported it.
bool is_timeout(milliseconds reported_for, milliseconds timeout) {
  return reported_for.count() > 0 && reported_for + kFirstReport + 2 * kWaitSlice >= timeout;
}

/// How long to wait for the reason. Such a wait has asked for it many times; another one may have
/// broken because of it just now.
milliseconds time_for_reason(milliseconds reported_for, milliseconds timeout) {
  const auto at_most = std::min(kReasonTimeout, timeout / 2);
  if (!is_timeout(reported_for, timeout)) return at_most;
  return std::max(milliseconds(0), at_most - reported_for);
}

}  // namespace

std::vector<int> GroupMonitor::job_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < setup_.size; ++rank) ranks.push_back(job_rank(rank));
  return ranks;
}

/// Reads the report of each rank of the group; empty if the store does not answer.
std::vector<RankReport> GroupMonitor::waiting_ranks() {
  auto& job = *setup_.job;
  if (!job.store()) return {};
  try {
    const auto read_all = [ranks = job_ranks()](c10d::Store& store) {
      std::vector<std::string> keys;
      for (const int rank : ranks) keys.push_back(report_key(rank));
      // In a group of another maker, a rank may not have set its own yet.
      return store.check(keys) ? read_reports(store, ranks) : std::vector<RankReport>();
    };
    const auto reports = job.executor().ask<std::vector<RankReport>>(read_all, job.store_timeout());
    if (reports) return *reports;
  } catch (const std::exception&) {
  }
  return {};
}

/// Names the waiting ranks that ran a step that others did not run: the likely cause if the ranks
/// wait in different collectives. "" if all ran the same number.
std::string GroupMonitor::describe_uneven_steps(const std::vector<RankReport>& waiting) const {
  const auto uneven = find_uneven_steps(waiting, setup_.key);
  const auto steps = shared_steps();
  if (!uneven || steps.empty()) return "";
  const auto names = [this](const std::vector<size_t>& ranks) {
    std::vector<int> in_job;
    for (const auto rank : ranks) in_job.push_back(job_rank(static_cast<int>(rank)));
    return ranks_text(in_job);
  };
  return steps.front()->text().explain(names(uneven->more), names(uneven->fewer));
}

/// Appends to `what` which ranks wait where this one does, as no other does for a message, and
/// where the other ranks wait.
std::string GroupMonitor::add_arrivals(const std::string& what, const std::string& where) {
  const auto waiting = waiting_ranks();
  if (waiting.empty()) return what;
  std::vector<int> here, elsewhere, absent;
  std::string others;
  for (int rank = 0; rank < setup_.size; ++rank) {
    const auto& place = waiting[static_cast<size_t>(rank)];
    const bool in_this_group = place.group == setup_.key;
    const bool is_here = in_this_group && place.where == where;
    (is_here ? here : elsewhere).push_back(job_rank(rank));
    if (place.where.empty()) absent.push_back(job_rank(rank));
    if (is_here || place.where.empty()) continue;
    // A group's name lists its ranks, for one of which that rank may wait.
    others += ddp::str(
        "; rank ", job_rank(rank), " waits in ", place.where,
        in_this_group ? "" : ddp::str(" of process group \"", place.group_name, '"'));
  }
  if (is_message_place(where)) return what + others + advice_for_message(where, others);
  auto& job = *setup_.job;
  if (is_timeout(job.late_waits().reported_for(), setup_.timeout)) job.expect_no_reader(absent);
  if (elsewhere.empty()) return what + "; all ranks had arrived";
  // A rank that waits nowhere does not make progress, whatever number of steps it ran.
  const auto cause = others.empty() ? "" : describe_uneven_steps(waiting);
  return ddp::str(
      cause, what, "; ", ranks_text(here), " had arrived, ", ranks_text(elsewhere), " had not",
      others);
}

/// "rank 1 of 3 has ended"; "" if all peers exist.
std::string GroupMonitor::describe_gone_ranks(milliseconds at_most) {
  const auto& job = *setup_.job;
  auto gone = setup_.job->find_gone(job_ranks(), at_most);
  if (gone.empty()) return "";
  bool hosted = std::find(gone.begin(), gone.end(), job.store_host()) != gone.end();
  // These may have left because of it: with the store went the text that says so.
  if (!hosted && job.is_host_gone()) {
    gone.insert(std::lower_bound(gone.begin(), gone.end(), job.store_host()), job.store_host());
    hosted = true;
  }
  return ddp::str(
      ranks_text(gone), " of ", job.size(), gone.size() == 1 ? " has" : " have",
      " ended, or left the process group",
      hosted ? ddp::str(" (rank ", job.store_host(), " hosts the store)") : "", errors_of(gone));
}

/// The ranks that have ended, or left; after a timeout those that wait nowhere, as a rank that
/// hangs in the user's code. On the thread whose wait failed.
std::vector<int> GroupMonitor::blamed_ranks() {
  auto& job = *setup_.job;
  auto blamed = job.find_gone(job_ranks(), kProbeTimeout);
  if (!blamed.empty()) return blamed;
  if (!is_timeout(job.late_waits().reported_for(), setup_.timeout)) return {};
  const auto waiting = waiting_ranks();
  for (size_t rank = 0; rank < waiting.size(); ++rank) {
    const int in_job = job_rank(static_cast<int>(rank));
    if (waiting[rank].where.empty() && in_job != job.rank()) blamed.push_back(in_job);
  }
  return blamed;
}

/// " (rank 3: ...)" with what threw on these ranks before they left; "" if nothing is known.
std::string GroupMonitor::errors_of(const std::vector<int>& ranks) {
  auto& job = *setup_.job;
  if (!job.store() || job.is_host_gone()) return "";
  try {
    const auto errors = job.executor().ask<std::string>(
        [ranks](c10d::Store& store) { return read_errors(store, ranks); }, job.store_timeout());
    return errors && !errors->empty() ? ddp::str(" (", *errors, ')') : "";
  } catch (const std::exception&) {
    return "";
  }
}

/// "; rank 1 of 3 cannot be reached: its host is down, or the network to it"; "" if all hosts can
/// be reached. A stopped process can be reached.
std::string GroupMonitor::describe_silent_ranks() const {
  const auto silent = setup_.job->find_silent(job_ranks());
  if (silent.empty()) return "";
  const bool is_one = silent.size() == 1;
  return ddp::str(
      "; ", ranks_text(silent), " of ", setup_.job->size(), " cannot be reached: ",
      is_one ? "its host is down, or the network to it" : "their hosts are down, or the network");
}

/// The remedy for a message that waits for a later call of another rank; "" if none is on its way.
std::string GroupMonitor::advice_for_order() const {
  if (!setup_.serializes_messages || !device_works_->has_single_message()) return "";
  return ". The group has device_id, so NCCL runs each send and recv after the calls before it, "
         "and "
         "before those after it: start those that wait for each other with batch_isend_irecv, or "
         "leave device_id out";
}

/// Returns the text of this rank's failure: the failure that another rank recorded before, or
/// `what` with the state of the peers. Waits a while for the former, since a failing rank may
/// be about to record it.
std::string GroupMonitor::describe_failure(const std::string& what, WaitPoint where) {
  auto& job = *setup_.job;
  if (job.is_generation()) return what;  // the coordinator knows more
  const auto reported_for = job.late_waits().reported_for();
  const auto end = Clock::now() + time_for_reason(reported_for, setup_.timeout);
  // For the other ranks' texts, if they find no reason either.
  begin_late_wait(where(), nullptr);
  job.late_waits().take_over();
  job.publish_waits();
  auto next_look = Clock::now();
  auto pause = kCheckInterval;
  while (true) {
    if (Clock::now() >= next_look) {
      job.late_waits().make_look_due();
      next_look = Clock::now() + std::exchange(pause, 2 * pause);
    }
    if (auto failure = job.request_failure(kAnswerTimeout)) return *failure;
    const auto silent = job.describe_silent_store();
    const auto gone = describe_gone_ranks(silent.empty() ? kProbeTimeout : kStoreTimeout);
    if (!gone.empty()) {
      if (auto recorded = job.failure_after_exit()) return *recorded;
      // Probe again: the first rank found may have left because of another one, whose end takes
      // longer.
      const auto all_gone = describe_gone_ranks(kProbeTimeout);
      return ddp::str(what, "; ", all_gone.empty() ? gone : all_gone);
    }
    if (!silent.empty()) return ddp::str(what, "; ", silent, describe_silent_ranks());
    if (!job.store() || Clock::now() >= end)
      return add_arrivals(what, where()) + describe_silent_ranks() + advice_for_order();
    std::this_thread::sleep_for(kCheckInterval);
  }
}

}  // namespace ddp
