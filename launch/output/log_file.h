#pragma once

#include "launch/environment.h"
#include "launch/options.h"
#include "launch/pipe.h"

namespace ddp::launch {

/// Opens `<log_dir>/attempt_<n>/rank_<r>.log`, with the folders that it needs. A file of an earlier
/// job is replaced.
///
/// \return empty without a log_dir.
/// \throws std::system_error  naming the file or folder that cannot be made.
Fd log_of(const LaunchOptions& options, const Attempt& attempt, int global_rank);

}  // namespace ddp::launch
