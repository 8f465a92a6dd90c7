// Compares the collectives that waiting ranks have called, through records in their group's store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "calls/call_history.h"

namespace ddp {

/// The collectives that a waiting rank has called.
struct CallRecord {
  int rank = -1;
  uint64_t steps = 0;  // the count of shared steps of the rank
  std::string where;   // the WaitPoint of the rank; may be ""
  CallList list;
};

/// Two ranks whose calls with one number differ.
struct Desync {
  CallRecord lower, upper;  // by rank
  uint64_t number = 0;      // the first that differs, among those in both records
};

/// Compares this rank's calls with those of the ranks that compared theirs before.
///
/// The store holds one record per lane: that of the rank that has made the most calls. A rank that
/// has made more calls, and the same ones, replaces it by its own. So in a world of any size a rank
/// compares its calls with one record, and of any two ranks that differ, one finds it. A rank that
/// has made fewer calls, all of them the same, does not differ.
///
/// \return nothing if no call differs.
/// Cost: one request to the store, and one or two more if the record is older; 6 KB at most.
std::optional<Desync> compare_calls(
    c10d::Store& store, CallHistory::Lane lane, const CallRecord& own);

/// "expected every rank to call the same collective number 17, but rank 0 called ...", with the
/// last calls of both ranks. Ends without a full stop.
std::string to_text(const Desync& desync);

}  // namespace ddp
