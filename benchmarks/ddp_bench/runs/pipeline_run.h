#pragma once

#include <ostream>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/options.h"

namespace ddp_bench {

/// Times steps of equal layers on one rank alone, and as a pipeline of all ranks, in turns: of
/// linear layers that compute, and of layers that sleep, whose bubble is the schedule's and the
/// messages' alone. On rank 0 writes a line for each, with the bubble beside the schedule's own.
///
/// \throws c10::Error  when the losses of one rank and of the pipeline differ, after the lines.
///
/// Collective: yes.
void run_pipeline(const Options& options, const ddp::ProcessGroup& group, std::ostream& out);

}  // namespace ddp_bench
