#pragma once

#include "launch/options.h"

namespace ddp::launch {

/// Runs this host's part of an elastic job, the coordinator alone, or both.
///
/// \param options  with `elastic`.
/// \param lifeline  the launcher's end of a pipe that ends the ranks with it: see run_guarded().
/// \return the launcher's exit code.
int run_elastic(const LaunchOptions& options, int lifeline);

}  // namespace ddp::launch
