#pragma once

#include "launch/options.h"

namespace ddp::launch {

/// Runs this host's part of a job, the coordinator alone, or both.
///
/// \param lifeline  the launcher's end of a pipe that ends the ranks with it: see run_guarded().
/// \return the launcher's exit code.
int run_job(const LaunchOptions& options, int lifeline);

}  // namespace ddp::launch
