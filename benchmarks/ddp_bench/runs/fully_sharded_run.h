#pragma once

#include <ostream>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/options.h"

namespace ddp_bench {

/// Times steps of eight equal layers of 1024 x 1024 elements, 128 rows and AdamW, in turns: as
/// replicas (DistributedDataParallel), with a unit a layer (FullyShardedDataParallel), and with
/// units that are kept whole between forward and backward. On rank 0 writes a line for each; with
/// `options.fsdp_memory` the peak memory of one instead, without what the process had before.
///
/// \throws c10::Error  when the ways ended with different losses, after the lines.
///
/// Collective: yes.
void run_fully_sharded(const Options& options, const ddp::ProcessGroup& group, std::ostream& out);

}  // namespace ddp_bench
