#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deadline.h"

namespace ddp {

/// The process that hosts the store ended while ranks of a roll call had still to come.
///
/// None of them has agreed on anything then. It may have hosted the store of an earlier group.
class EarlyLossError : public c10::DistStoreError {
 public:
  using c10::DistStoreError::DistStoreError;
};

/// What the ranks of a roll call share.
struct RollCall {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  Deadline deadline{std::chrono::milliseconds(0)};
  std::string subject;  // who calls, for the message: "init_process_group"
  /// Set by another thread, ends the call with an error; may be empty.
  std::shared_ptr<std::atomic<bool>> given_up = {};
};

/// Waits until every rank has called it, and makes sure that all of them learn how it went.
///
/// The first rank opens a roll, the last one to come completes it. When all have confirmed that,
/// or a rank's deadline has passed, that rank writes one verdict, which all throw or return by.
/// Rank 0 then stays until the others have read it, because the store often lives in its process
/// and would go with it.
///
/// It can be repeated over the same store, also by new processes after the old ones died. Each roll
/// has a fresh random name. A rank that finds its number taken in the open roll, or another claim,
/// takes that for what the dead left behind and opens the next roll, where those that live come
/// too. What it finds in a roll that was opened after its call began is no leftover: then two
/// processes have one rank, or ranks disagree, and that is the verdict.
///
/// \param claim  what all ranks have to agree on, such as the world size: free text.
/// \param problem  why this rank cannot go on, if so: once all are here, all throw it.
/// \return  the roll's name, random and equal on all ranks: a prefix for keys that must not meet
///          those of an earlier run.
/// \throws c10::Error  on every rank that came, with the same words: naming the ranks that did not,
///         a rank that two processes claim, two ranks whose claims differ, or a rank with its
///         problem. Also when the store does not answer, or is lost, with words of this rank's own:
///         an EarlyLossError when it is lost before all ranks have come.
///
/// Collective: yes. Blocks: host, until the deadline + 1 s (+ 2 s on rank 0 after a failure), also
/// where the process that hosts the store is frozen.
/// Cost: about 15 operations on the store a rank, and one every max(20, world size / 2) ms while it
/// waits; after a failure world-size more on one of the ranks.
std::string call_roll(
    const RollCall& roll, const std::string& claim = "", const std::string& problem = "");

}  // namespace ddp
