#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/options.h"

namespace ddp::launch {

/// One `NAME=value` per entry.
using Environment = std::vector<std::string>;

/// One start of all ranks.
struct Attempt {
  int number = 0;   // 0, or which restart
  int master_port;  // what the ranks get as MASTER_PORT
};

/// Decides a rank's OMP_NUM_THREADS.
///
/// \param inherited  OMP_NUM_THREADS of ddprun's own environment, if set.
/// \param cores  cores that ddprun may use, >= 1.
/// \return the option, else what the user has set, else an even share of the cores, at least 1:
///         without it every rank would start a thread on every core.
std::string omp_threads(
    const LaunchOptions& options, const std::optional<std::string>& inherited, int cores);

/// Makes the environment of one rank: `inherited`, with what names the rank put in or replaced.
///
/// Variables of a surrounding torchrun (TORCHELASTIC_*) are dropped: they speak of its store, and
/// a rank 0 that found them would not open the one this job needs.
///
/// \param local_rank  0 <= local_rank < options.local_ranks.
Environment rank_environment(
    const Environment& inherited, const LaunchOptions& options, const Attempt& attempt,
    int local_rank, const std::string& omp_threads);

/// The rank in the whole job: hosts hold consecutive ranks, in the order of their node rank.
int global_rank(const LaunchOptions& options, int local_rank);

/// Reads this process's own environment.
Environment current_environment();

/// Counts the cores that this process may run on, >= 1.
int usable_cores();

}  // namespace ddp::launch
