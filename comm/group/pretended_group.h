#pragma once

#include <ddp/process_group.h>

#include "base/environment.h"
#include "pretend/present_ranks.h"

namespace ddp {

/// Makes the group of a job whose other ranks need not exist, without meeting them. Present ranks
/// meet.
ProcessGroup build_pretended_group(
    const ProcessGroupOptions& options, const Environment& environment, const PretendedRank& self);

/// Begins the list of calls, where DDP_CALLS_DIR is set.
void start_call_log(const Environment& environment, int rank, int world_size);

}  // namespace ddp
