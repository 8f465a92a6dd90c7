// Matches the calls of several ranks that belong together.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "launch/pretend/call_list.h"

namespace ddp::launch {

/// A call of a rank: indices into the lists, and into the list's calls.
struct CallOfRank {
  size_t list;
  size_t call;
};

/// A group as its present members have it.
struct MetGroup {
  std::string name, axis;
  std::vector<int> ranks;
  struct Member {
    size_t list;                // index
    bool has_group = false;     // in its list
    std::vector<size_t> calls;  // its collectives there, in order
  };
  std::vector<Member> members;  // the present ones, by rank
};

/// One collective, or one message, as far as ranks are present.
struct Meeting {
  size_t group;
  size_t lane;      // meetings of one lane go one after the other
  size_t number;    // of the group's collectives, or of the messages between two ranks with a tag
  size_t expected;  // calls
  std::vector<CallOfRank> calls;
};

/// The messages with one tag from one rank to another one of a group. A send meets the receive at
/// its index, if there is one.
struct MessageLane {
  size_t group;
  int from, to;  // ranks of the world
  std::vector<CallOfRank> sends, receives;
  bool both_are_present = false;  // and the receiver takes none from a rank that its list lacks
};

struct Meetings {
  std::vector<MetGroup> groups;
  std::vector<MessageLane> messages;
  std::vector<Meeting> all;
  size_t lanes = 0;
  std::vector<std::vector<size_t>> of_calls;  // by list and call: index into `all`
};

/// Groups with equal names, axes and ranks are one; so are the k-th of several such groups of each
/// rank. In a group, the k-th collectives of its ranks meet, of whatever kind they are. The k-th
/// send with a tag, a size and a dtype from one rank to another one meets the k-th such receive
/// there, because programs that write no tags receive in another order; what is left meets in
/// order.
///
/// Cost: O(calls + members of groups * log(lists)).
Meetings find_meetings(const std::vector<CallList>& lists);

}  // namespace ddp::launch
