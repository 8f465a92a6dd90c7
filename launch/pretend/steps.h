#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "launch/pretend/call_list.h"

namespace ddp::launch {

/// A part of a list.
struct StepOfList {
  int64_t number = -1;        // of the step; -1: the whole run, which names no step
  size_t begin = 0, end = 0;  // events
  bool has_event(size_t event) const { return begin <= event && event < end; }
};

/// The last step that ended on every rank by the beginning of another one; where a rank has none,
/// its last step up to its end, and without steps all.
///
/// \return by list.
std::vector<StepOfList> last_whole_steps(const std::vector<CallList>& lists);

/// The calls of one kind in groups of one axis and size.
struct CallsOfKind {
  std::string axis, kind;
  int64_t ranks = 0;  // of the group
  int64_t calls = 0, bytes = 0;
};

/// \return by axis and kind.
std::vector<CallsOfKind> calls_by_kind(const CallList& list, const StepOfList& step);

/// Seconds between the calls and waits of a step.
double seconds_of_computing(const CallList& list, const StepOfList& step);

}  // namespace ddp::launch
