// Compares the collectives that the ranks of a group have called.
#include <utility>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "monitor/call_records.h"
#include "monitor/failure_records.h"
#include "monitor/store_answers.h"

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
/// The query records a difference as the group's failure, and returns that failure.
GroupMonitor::StoreQuery GroupMonitor::make_comparison(const std::string& where) const {
  CallRecord own;
  own.rank = setup_.rank;
  own.where = where;
  {
    const std::lock_guard lock(mutex_);
    own.attempts = attempts_;
  }
  std::vector<std::pair<Lane, CallRecord>> records;
  for (const auto lane : CallHistory::kLanes) {
    own.list = setup_.calls->read(lane);
    if (!own.list.calls.empty()) records.emplace_back(lane, own);
  }
  return [records = std::move(records),
          name = setup_.group_name](c10d::Store& store) -> std::optional<std::string> {
    for (const auto& [lane, record] : records) {
      if (const auto desync = compare_calls(store, lane, record)) {
        return record_failure(
            store,
            ddp::str(likely_cause(*desync), "process group \"", name, "\": ", to_text(*desync)));
      }
    }
    return std::nullopt;
  };
}

}  // namespace ddp
