// Runs lists of calls with clocks: a check of their order, and a prediction of time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "launch/pretend/call_list.h"
#include "launch/pretend/meetings.h"
#include "launch/pretend/settings.h"
#include "launch/pretend/steps.h"

namespace ddp::launch {

/// Calls of which each one depends on the one before: it is the next of the same group, or a rank
/// waited for that one before it made this one.
struct Chain {
  int64_t calls = 0;
  int64_t rounds = 0;  // of messages in rings: of the chain that has most of them
};

struct ReplayedRank {
  bool has_ended = false;
  size_t waits_for = 0;     // index of the call, where it has not ended
  size_t made = 0;          // calls
  double step_seconds = 0;  // from the beginning of its step to the beginning of the next one
};

struct Replay {
  std::vector<ReplayedRank> ranks;  // by list
  std::vector<bool> has_met;        // by meeting: all of its present ranks came
  Chain chain;                      // the longest one of the steps

  bool all_ended() const;
};

/// Lets each present rank go through its list. A call begins when all present ranks of its group
/// have made it and the call before it in its group is over; calls of different groups run at the
/// same time, and take nothing from each other and from computation. A rank stops where it waits
/// for a call that is not over. A message is a call of two ranks: it begins when it is received,
/// too.
///
/// \param steps  by list: of the chain, and of step_seconds.
/// \param links  unset: messages take no time.
///
/// Cost: O(events * log(ranks)) where ranks wait for few others.
Replay replay(
    const std::vector<CallList>& lists, const Meetings& meetings,
    const std::vector<StepOfList>& steps, const std::optional<Links>& links);

}  // namespace ddp::launch
