// Whether ranks whose calls are in lists would meet: groups, kinds, dtypes, sizes, roots, and
// groups that wait for each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/pretend/call_list.h"
#include "launch/pretend/meetings.h"

namespace ddp::launch {

struct OrderFault {
  enum class Kind {
    MissingGroup,
    MissingCall,
    ExtraCall,
    OtherKind,
    OtherDtype,
    OtherSize,
    OtherRoot,
    UnmatchedMessage,
    NeverWaited,
    Deadlock,
  };
  Kind kind;
  std::vector<int> ranks;  // those that differ from most; of a deadlock all that wait
  std::string group;       // its name
  std::string place;       // of the call; may be empty
  int64_t step = -1;       // of the call; -1: before the first one
  std::string text;        // a sentence, with the remedy
};

/// "other_size".
const char* name_of(OrderFault::Kind kind);

/// Compares the calls of present ranks, group by group, and lets the ranks go through them.
///
/// The first fault of each group is returned: those after it may follow from it. A deadlock of
/// groups of which one has another fault is left out for the same reason. Nothing is said of calls
/// after the end of a list that is not complete.
std::vector<OrderFault> check_order(const std::vector<CallList>& lists, const Meetings& meetings);

/// Finds ranks that wait for each other.
///
/// \return the shortest such cycle; empty: there is none.
std::vector<OrderFault> find_deadlock(
    const std::vector<CallList>& lists, const Meetings& meetings,
    const std::vector<bool>& is_faulty);  // by group

}  // namespace ddp::launch
