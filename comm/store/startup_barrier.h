#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"

namespace ddp {

/// The process that hosts the store ended before all ranks of a startup barrier had arrived.
///
/// So the ranks have not agreed on anything. The process may have hosted an earlier group's store.
class EarlyLossError : public c10::DistStoreError {
 public:
  using c10::DistStoreError::DistStoreError;
};

/// The settings of a barrier, which are the same on all ranks except for `rank`.
struct StartupBarrier {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  Deadline deadline{std::chrono::milliseconds(0)};
  std::string subject;  // the calling function, for messages: "init_process_group"
};

/// Waits until every rank has called it, and makes all of them return or throw alike.
///
/// The first rank opens a round, the last one to arrive completes it. When all have confirmed that,
/// or when a rank's deadline has passed, one rank writes a verdict, by which all ranks return or
/// throw. Rank 0 then waits until the others have read it, because the store often lives in its
/// process and would end with it.
///
/// It can be repeated over the same store, also by new processes after the old ones died. Each
/// round has a fresh random name. A rank that finds its number taken in the open round, or another
/// claim, assumes that dead processes left it there and opens the next round, which the live ranks
/// join too. Neither can be a leftover in a round that was opened after this call began: then two
/// processes have one rank, or ranks disagree, and that is the verdict.
///
/// \param claim  a text that must be the same on all ranks, such as the world size.
/// \param problem  why this rank cannot continue; once all ranks have arrived, all throw it. Empty:
///         it can.
/// \return  the round's name, random and equal on all ranks: a prefix for keys that must differ
///          from those of an earlier run.
/// \throws c10::Error  on every rank that arrived, with the same text: naming the missing ranks, a
///         rank that two processes claim, two ranks whose claims differ, or a rank with its
///         problem. Also if the store does not answer, or is lost, with a text of this rank: an
///         EarlyLossError if it is lost before all ranks have arrived.
///
/// Collective: yes. Blocks: host, until the deadline + 1 s (+ 2 s on rank 0 after a failure), also
/// if the process that hosts the store is frozen.
/// Cost: about 15 operations on the store per rank, and one every max(20, world size / 2) ms while
/// it waits; after a failure world-size more on one of the ranks.
std::string run_startup_barrier(
    const StartupBarrier& barrier, const std::string& claim = "", const std::string& problem = "");

}  // namespace ddp
