// Compares the collectives that the ranks of a group have called.
#include <utility>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "monitor/attempts.h"
#include "monitor/call_records.h"
#include "monitor/failure_records.h"
#include "monitor/job_monitor.h"
#include "monitor/uneven_forwards.h"

namespace ddp {
namespace {

using Lane = CallHistory::Lane;

std::string likely_cause(const Desync& desync) {
  const auto& [lower, upper, number] = desync;
  if (lower.attempts == upper.attempts) return "";
  const bool lower_began = lower.attempts > upper.attempts;
  return monitor::uneven_forwards_text(
      ddp::str("rank ", (lower_began ? lower : upper).rank),
      ddp::str("rank ", (lower_began ? upper : lower).rank));
}

}  // namespace

/// Makes a query that compares this rank's calls up to now with those of another rank that waits.
/// The query records a difference as the job's failure, and returns that failure. Empty if the
/// group's calls are not compared.
JobMonitor::StoreQuery GroupMonitor::make_comparison(const std::string& where) const {
  const auto& job = *setup_.job;
  if (!setup_.calls || !job.store()) return nullptr;
  CallRecord own;
  own.rank = job.rank();
  own.where = where;
  own.attempts = attempts_->count();
  std::vector<std::pair<Lane, CallRecord>> records;
  for (const auto lane : CallHistory::kLanes) {
    own.list = setup_.calls->read(lane);
    if (!own.list.calls.empty()) records.emplace_back(lane, own);
  }
  const auto of_group = c10::make_intrusive<c10d::PrefixStore>("group/" + setup_.key, job.store());
  return [records = std::move(records), of_group,
          name = setup_.group_name](c10d::Store& of_job) -> std::optional<std::string> {
    for (const auto& [lane, record] : records) {
      if (const auto desync = compare_calls(*of_group, lane, record)) {
        return record_failure(
            of_job,
            ddp::str(likely_cause(*desync), "process group \"", name, "\": ", to_text(*desync)));
      }
    }
    return std::nullopt;
  };
}

}  // namespace ddp
