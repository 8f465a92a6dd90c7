// The first collective in which two ranks that wait differ.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "calls/call_history.h"

namespace ddp {

/// The latest collectives of a rank that waits late, in one list of a group: those of CPU tensors,
/// or of other tensors.
struct RankCalls {
  int rank = -1;     // of the job
  std::string list;  // the group and lane: one name on all ranks
  std::string group_name;
  std::string where;   // the WaitPoint; may be ""
  uint64_t steps = 0;  // the count of shared steps of the rank in the group
  StepsText steps_text;
  CallList calls;
};

/// Two ranks whose calls with one number differ.
struct CallDifference {
  RankCalls lower, upper;  // by rank
  uint64_t number = 0;     // the first that differs, among those that both have
};

/// Compares, in each list, the ranks' calls with those of the rank that has made the most.
///
/// A rank that has made fewer calls, all of them the same, does not differ, however late it is.
///
/// Cost: a comparison for each call.
std::optional<CallDifference> find_call_difference(const std::vector<RankCalls>& ranks);

/// "process group "default_pg": expected every rank to call the same collective number 17, but rank
/// 0 called ...", with the last calls of both ranks. Ends without a full stop.
std::string to_text(const CallDifference& difference);

/// The value of calls_key() in the store, without the rank, which the key says.
std::string to_text(const std::vector<RankCalls>& calls);
/// Takes any text: other programs can write to the store. Empty for one that no rank wrote.
std::vector<RankCalls> parse_calls(int rank, const std::string& text);

}  // namespace ddp
