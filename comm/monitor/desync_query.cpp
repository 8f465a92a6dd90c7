// How a rank that waits compares the collectives it has called with those of the others.
#include <utility>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "monitor/compare_calls.h"
#include "monitor/failure_records.h"
#include "monitor/job_monitor.h"

namespace ddp {
namespace {

using Lane = CallHistory::Lane;

std::string likely_cause(const Desync& desync, const SharedSteps* steps) {
  const auto& [lower, upper, number] = desync;
  if (lower.steps == upper.steps || !steps) return "";
  const bool lower_ran_more = lower.steps > upper.steps;
  return steps->explain(
      ddp::str("rank ", (lower_ran_more ? lower : upper).rank),
      ddp::str("rank ", (lower_ran_more ? upper : lower).rank));
}

}  // namespace

/// Makes a query that compares this rank's calls up to now with those of another rank that waits.
/// The query records a difference as the job's failure, and returns that failure. Empty if the
/// group's calls are not compared.
JobMonitor::StoreQuery GroupMonitor::make_comparison(const std::string& where) const {
  if (!setup_.calls || !store_) return nullptr;
  CallRecord own;
  own.rank = setup_.job->rank();
  own.where = where;
  own.steps = count_steps();
  std::vector<std::pair<Lane, CallRecord>> records;
  for (const auto lane : CallHistory::kLanes) {
    own.list = setup_.calls->read(lane);
    for (auto& call : own.list.calls) {
      if (call.root >= 0) call.root = job_rank(call.root);
    }
    if (!own.list.calls.empty()) records.emplace_back(lane, own);
  }
  const auto all_steps = shared_steps();
  return [records = std::move(records), of_group = store_, name = setup_.group_name,
          steps = all_steps.empty() ? nullptr : all_steps.front()](
             c10d::Store& of_job) -> std::optional<std::string> {
    for (const auto& [lane, record] : records) {
      if (const auto desync = compare_calls(*of_group, lane, record)) {
        return record_failure(
            of_job, ddp::str(
                        likely_cause(*desync, steps.get()), "process group \"", name,
                        "\": ", to_text(*desync)));
      }
    }
    return std::nullopt;
  };
}

}  // namespace ddp
