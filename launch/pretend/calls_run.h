#pragma once

#include <functional>

#include "launch/options.h"

namespace ddp::launch {

/// Runs a job whose ranks write lists of their calls, where it has such ranks, and reports on the
/// lists of a pretended world; or reports on those that a folder has.
///
/// The report goes to stdout. Of a job that failed only the faults in the order of its calls are
/// said, on stderr, or in the object.
///
/// \param run  runs the job, and returns its exit code.
/// \return the job's exit code; 1 where the calls of the ranks would not meet.
/// \throws std::exception  naming a list or a folder that is not as expected.
int run_with_calls(LaunchOptions options, const std::function<int(const LaunchOptions&)>& run);

}  // namespace ddp::launch
