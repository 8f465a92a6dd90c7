// What ranks that wait write into their group's store about the collectives they have called.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "call_history.h"

namespace ddp {

/// A rank that waits, and what it has called.
struct CallRecord {
  int rank = -1;
  uint64_t attempts = 0;  // training forward passes that the rank has begun
  std::string where;      // what it waits in; may be ""
  CallList list;
};

/// Two ranks whose collectives of one number differ.
struct Desync {
  CallRecord lower, upper;  // by rank
  uint64_t number = 0;      // the first that differs, of those that both records have
};

/// Compares this rank's calls with those of the ranks that compared theirs before.
///
/// The store holds one record for each lane: that of the rank that has come farthest. A rank that
/// has called more, and the same, puts its own there. So in a world of any size a rank compares
/// itself with one record, and any two ranks that differ are found by one of them. A rank that has
/// called fewer differs from nobody.
///
/// \return nothing where no call differs.
/// Cost: one request to the store, and one or two more where the record is older; 6 KB at most.
std::optional<Desync> compare_calls(
    c10d::Store& store, CallHistory::Lane lane, const CallRecord& own);

/// "expected every rank to call the same collective number 17, but rank 0 called ...", with the
/// last calls of both ranks. Ends without a full stop.
std::string to_text(const Desync& desync);

}  // namespace ddp
