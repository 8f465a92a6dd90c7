#pragma once

#include <cstdint>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// Whether ranks with more batches leave some out, or ranks with fewer repeat some.
enum class EqualBatches { Least, Most };
/// An older name of EqualBatches.
using Equal = EqualBatches;

/// A number of batches that is the same on every rank, for models whose forward is collective in
/// evaluation, too (FullyShardedDataParallel, layers cut over ranks): ranks that ran different
/// numbers of them would wait for each other.
///
/// \param batches  of this rank.
/// \return the least, or the most, that a rank has.
///
/// Collective: yes. Blocks: host. Cost: one all-reduce of 8 bytes.
DDP_API int64_t equal_batches(
    int64_t batches, EqualBatches which = EqualBatches::Least, const GroupArg& group = {});

}  // namespace ddp
