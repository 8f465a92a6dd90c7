#pragma once

#include <cstdint>
#include <string>

#include "monitor/wait_cycle.h"

namespace ddp {

/// What a rank writes into its job's store, for the other ranks' texts, and to find ranks that wait
/// for each other.
struct RankReport {
  std::string address;       // of its LivenessSocket; "": none
  std::string group;         // the key of the group that the rank waits in
  std::string where;         // the WaitPoint; "": the rank does not wait late
  uint64_t steps = 0;        // the count of shared steps
  BlockedRank blocked = {};  // without the rank, which the store's key says
  std::string group_name = {};
};

std::string to_text(const RankReport& report);
/// Takes any text: other programs can write to the store.
RankReport parse_report(const std::string& text);

}  // namespace ddp
