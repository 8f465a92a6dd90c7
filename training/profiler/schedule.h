// Decides which step is recorded, and which actions come between two steps. Pure.
#pragma once

#include <cstdint>
#include <optional>

#include <ddp/profiler.h>

namespace ddp::profiling {

/// \throws c10::ValueError  an option out of its range.
void check_schedule(const ProfilerOptions& options);

/// \param step  from 0.
ProfilerAction action_of_step(const ProfilerOptions& options, int64_t step);

/// The actions between two steps, in this order.
struct Transition {
  /// A recording that is prepared and not begun cannot be dropped: it begins and ends.
  bool start_prepared = false;
  bool stop = false;
  bool trace_ready = false;
  bool prepare = false;
  bool start = false;
};

inline bool operator==(const Transition& a, const Transition& b) {
  return a.start_prepared == b.start_prepared && a.stop == b.stop &&
         a.trace_ready == b.trace_ready && a.prepare == b.prepare && a.start == b.start;
}

/// \param to  none: the profiler stops.
Transition transition(ProfilerAction from, std::optional<ProfilerAction> to);

const char* name_of(ProfilerAction action);

}  // namespace ddp::profiling
