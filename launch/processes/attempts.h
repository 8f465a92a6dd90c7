#pragma once

#include "launch/options.h"

namespace ddp::launch {

/// Starts this node's ranks, and starts them again after one failed, until they succeed or no
/// restart is left. With several nodes and restarts, the nodes agree on each attempt.
///
/// \param lifeline  the launcher's end of a pipe that ends the ranks with it: see run_guarded().
/// \return the launcher's exit code.
int run_attempts(const LaunchOptions& options, int lifeline);

}  // namespace ddp::launch
