#pragma once

#include <ostream>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/options.h"

namespace ddp_bench {

/// Times steps of two linear layers, 1024 to 4096 to 1024 features and 512 rows, on one rank alone
/// and cut over all ranks, in turns. On rank 0 writes a line for each.
///
/// The input requires a gradient, as in the middle of a model: a cut step sums the output in
/// forward and the input's gradient in backward.
///
/// \throws c10::Error  when both ended with different parameters, after the lines.
///
/// Collective: yes.
void run_tensor_parallel(const Options& options, const ddp::ProcessGroup& group, std::ostream& out);

}  // namespace ddp_bench
