#pragma once

#include <ostream>

#include <ddp/process_group.h>

#include "options.h"

namespace ddp_bench {

/// Runs the program for a parsed command line: measures, checks, and on rank 0 writes a line for
/// each mode.
///
/// \throws c10::Error  when modes or ranks ended with different parameters, after the lines; when
///         the timeline cannot be written, before the measurement.
///
/// Collective: yes.
void run(const Options& options, const ddp::ProcessGroup& group, std::ostream& out);

}  // namespace ddp_bench
