// One value for all parameter groups of a schedule, or one for each.
#pragma once

#include <cstddef>

#include <ddp/internal/check.h>
#include <ddp/lr_scheduler.h>

namespace ddp {

/// \throws c10::ValueError  neither one value nor one a group.
inline void check_count(
    const char* schedule, const char* what, const PerGroup& values, size_t groups) {
  const auto count = values.values().size();
  DDP_CHECK_VALUE(
      count == 1 || count == groups, schedule, ": expected one ", what, ", or one for each of the ",
      groups, " parameter groups, got ", count, ".");
}

inline double value_of_group(const PerGroup& values, size_t group) {
  return values.values().size() == 1 ? values.values().front() : values.values()[group];
}

}  // namespace ddp
