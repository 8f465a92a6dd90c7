#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/engines/engine.h"
#include "fingerprint.h"

namespace ddp_bench {

/// A mode that is timed, and its times so far.
struct Contestant {
  std::string mode;
  std::optional<double> bucket_cap_mb;  // of a sweep
  bool communicates = true;
  std::unique_ptr<Engine> engine;
  std::vector<double> step_ms = {};
  std::vector<double> comm_ms = {};        // of a step's messages alone
  std::vector<double> round_step_ms = {};  // by round, the median of its steps
  std::vector<double> round_cpu_ms = {};   // by round, CPU time of a step; mean of the ranks

  /// "ddp at 25 MiB"
  std::string label() const;
};

struct ContestOptions {
  int iters = 1;
  int rounds = 1;
  int warmup = 0;
};

/// Trains the contestants in turns, and fills in their times.
///
/// In a turn, one trains `iters` steps and then sends its messages alone a few times. Every other
/// round runs in the opposite order: the caches and the clock speed that the mode before leaves
/// then help or hurt all modes alike.
///
/// Collective: yes.
void compete(
    std::vector<Contestant>& contestants, const ContestOptions& options,
    const ddp::ProcessGroup& group, c10::Device device = at::kCPU);

/// Compares the final parameters of the communicating contestants.
///
/// \param start  the initial parameters of all.
/// \param agreement  required between modes; ranks must agree to the bit.
/// \return the same text on all ranks, naming the modes or the ranks that differ; "" when none do.
///
/// Collective: yes.
std::string check_parameters(
    const std::vector<Contestant>& contestants, const std::vector<at::Tensor>& start,
    const ddp::ProcessGroup& group, Agreement agreement);

}  // namespace ddp_bench
