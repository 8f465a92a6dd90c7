#pragma once

#include <ddp/process_group.h>

#include "shard_cursor.h"

namespace ddp {

/// Implements ShardedSampler::rebind for a sampler with this cursor.
void rebind(ShardCursor& cursor, const ProcessGroup& group);

}  // namespace ddp
