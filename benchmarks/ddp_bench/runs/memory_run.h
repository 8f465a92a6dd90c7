#pragma once

#include <ostream>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/options.h"

namespace ddp_bench {

/// Trains in the first mode of the options, samples the memory of each rank, and on rank 0 writes a
/// line.
///
/// The process holds nothing else: no other mode's replica, no parameters to compare with.
///
/// \throws c10::Error  where the kernel does not report a process's memory.
///
/// Collective: yes.
void run_memory(const Options& options, const ddp::ProcessGroup& group, std::ostream& out);

}  // namespace ddp_bench
