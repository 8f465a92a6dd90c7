#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "monitor/wait_cycle.h"

namespace ddp {

/// A rank that waits late writes this into its job's store: for the other ranks' texts, and for the
/// rank that looks for the cause.
struct RankReport {
  std::string address;       // of its LivenessSocket; "": none
  std::string group;         // the key of the group that the rank waits in
  std::string where;         // the WaitPoint; "": the rank does not wait late
  uint64_t steps = 0;        // the count of shared steps
  BlockedRank blocked = {};  // without the rank, which the store's key says
  std::string group_name = {};
  uint64_t calls = 0;  // changes with the rank's calls in the store; 0: it wrote none
};

std::string to_text(const RankReport& report);
/// Takes any text: other programs can write to the store.
RankReport parse_report(const std::string& text);

/// The store key of a rank's report; set before any rank makes its monitor, so that one request can
/// read several.
std::string report_key(int rank);
/// The store key of the rank's latest calls: see call_difference.h.
std::string calls_key(int rank);
std::vector<RankReport> read_reports(c10d::Store& store, const std::vector<int>& ranks);

/// The ranks of those that wait in one group that ran the most steps, and the fewest: indices.
struct UnevenSteps {
  std::vector<size_t> more, fewer;
};
/// \return nothing if all that wait in the group ran as many.
std::optional<UnevenSteps> find_uneven_steps(
    const std::vector<RankReport>& ranks, const std::string& group);

// Where a rank waits that sends or receives a message: there no other rank waits.

/// "send to rank 1 with tag 0", "recv from any rank with tag 0" without a peer.
std::string message_place(bool sends, std::optional<int> peer, int tag);
bool is_message_place(const std::string& where);
/// The remedy for a rank that waits in `where` and others as `others` says: "" if none is known.
std::string advice_for_message(const std::string& where, const std::string& others);

}  // namespace ddp
