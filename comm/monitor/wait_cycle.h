// Ranks that wait for each other in different groups.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ddp {

/// A call of a collective that a thread of a rank waits for.
struct AwaitedCall {
  static constexpr int kAll = -1;
  std::string list;     // the group and lane of the call: one name on all ranks
  uint64_t number = 0;  // in that list
  int needs = kAll;     // the rank that has to make the call; kAll: all ranks of the group
  std::string text;     // "rank 1 of 4 waits in call 7 of ..."
};

/// A rank all of whose threads that make calls wait for one.
struct BlockedRank {
  int rank = -1;
  std::vector<AwaitedCall> waits;        // one of each thread; empty: the rank is not blocked
  std::map<std::string, uint64_t> made;  // how many calls, by list, in all groups of the rank
};

struct WaitOfRank {
  int rank = -1;
  std::string text;
};

/// Finds the fewest ranks that wait for each other: each of them for the next one, and the last for
/// the first.
///
/// A rank has come to a call that it made, whatever it waits for. A rank may go on if one of its
/// threads waits for no rank of `ranks`, or only for those that may go on.
///
/// The descriptions may be from different times, and out of date: a rank that was blocked goes on
/// only after a call that another one makes. Of the ranks of a cycle, none would be the first.
///
/// \return  empty if there is none.
/// Cost: in a group, a comparison for each two blocked ranks.
std::vector<WaitOfRank> find_wait_cycle(const std::vector<BlockedRank>& ranks);

/// "deadlock: rank 1 of 4 waits in ... for rank 0; ...". Ends without a full stop.
std::string to_text(const std::vector<WaitOfRank>& cycle);

}  // namespace ddp
