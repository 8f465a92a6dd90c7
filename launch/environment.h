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
  int number = 0;   // 0, or the number of the restart
  int master_port;  // MASTER_PORT of the ranks
};

/// Decides a rank's OMP_NUM_THREADS.
///
/// \param inherited  OMP_NUM_THREADS of ddprun's own environment, if set.
/// \param cores  cores that ddprun may use, >= 1.
/// \return the option, else what the user has set, else an even share of the cores, at least 1:
///         without it every rank would start a thread on every core.
std::string omp_threads(
    const LaunchOptions& options, const std::optional<std::string>& inherited, int cores);

/// Makes the environment of one rank: `inherited`, with the rank's own variables added or replaced.
///
/// Drops the variables of a surrounding torchrun (TORCHELASTIC_*): they describe its store, and a
/// rank 0 that found them would not open the store that this job needs.
///
/// \param local_rank  0 <= local_rank < options.local_ranks.
Environment rank_environment(
    const Environment& inherited, const LaunchOptions& options, const Attempt& attempt,
    int local_rank, const std::string& omp_threads);

/// Computes the rank in the whole job: hosts hold consecutive ranks, in the order of their node
/// rank.
int global_rank(const LaunchOptions& options, int local_rank);

/// How many ranks that host runs.
int ranks_of_node(const LaunchOptions& options, int node);

/// The ranks of all hosts.
int world_size(const LaunchOptions& options);

Environment current_environment();

/// How many cores the CPU quotas of a process's control groups add up to, rounded down, at least 1;
/// nothing if none of them, nor of those above, has a quota. A container shows all cores of its
/// host and stops its threads once they have used its share of the time.
///
/// \param groups  the text of /proc/self/cgroup, of version 1 or 2.
/// \param mount  where the control groups are: /sys/fs/cgroup.
std::optional<int> cores_of_quota(const std::string& groups, const std::string& mount);

/// Counts the cores that this process may run on, >= 1: its affinity's, and no more than the quotas
/// of its control groups give.
int usable_cores();

/// Counts the NVIDIA GPUs that programs may use, >= 0.
///
/// \param devices  the folder with their files, nvidia0, ...: /dev, of which a container sees its
/// own. \param visible  CUDA_VISIBLE_DEVICES, if set: CUDA stops at the first that is none, such as
/// -1.
int usable_gpus(const std::string& devices, const std::optional<std::string>& visible);

}  // namespace ddp::launch
