#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <ddp/export.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `spawn`, with the names and the defaults of ddprun's.
///
/// Example:
/// ```
/// ddp::spawn(4, train, ddp::SpawnOptions().max_restarts(3).log_dir("logs"));
/// ```
struct SpawnOptions {
  /// How long ranks may take to end before they are killed, >= 0. Default: 3 s after another rank
  /// has failed, 5 s after a signal
  TORCH_ARG(std::optional<std::chrono::milliseconds>, grace) = {};
  /// Whether each line of a rank's output begins with its number, "[1] ". Without, ranks write
  /// straight to the program's stdout and stderr. Default: true
  TORCH_ARG(bool, prefix) = true;
  /// A folder that keeps what each rank writes, too: attempt_0/rank_0.log, ... Default: none
  TORCH_ARG(std::string, log_dir) = "";
  /// How often all ranks start again after one has failed, >= 0. Default: 0
  TORCH_ARG(int, max_restarts) = 0;
  /// OMP_NUM_THREADS and at::get_num_threads() of the ranks, >= 1. Default: the variable's value,
  /// or an even share of the cores
  TORCH_ARG(std::optional<int>, omp_threads) = {};
};

/// Runs `body` as the ranks 0, 1, ... of this host, each in a process of its own, as
/// `ddprun -n nprocs` runs a program; returns when all ranks have returned from it.
///
/// A rank is a copy of this process, with all of its memory at the time of the call. It finds RANK,
/// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... in its environment, so init_process_group() needs no
/// options. Threads are not copied, and with them LibTorch's pools and CUDA would be broken: call
/// this first in main(), before the program computes. A rank that returns from `body` ends its
/// default group, and then its process, with what C's and C++'s standard streams hold written. What
/// this process has for its own end (atexit(), destructors of static objects) does not run in a
/// rank.
///
/// Where `body` throws on a rank, or the rank ends otherwise than with 0, the other ranks get
/// SIGTERM, and SIGKILL after `grace`. SIGINT, SIGTERM, SIGHUP and SIGQUIT to this process go to
/// all ranks, and once these have ended, to this process: its handler runs then, or the process
/// ends by the signal. SIGUSR1 and SIGUSR2 go to the ranks only. Where this process is killed, by
/// SIGKILL too, so are the ranks and all that they have started. Rank 0 reads this process's stdin.
///
/// \param nprocs  ranks, 1 to 1024.
/// \param body  what a rank does; gets its rank. What it changes in memory, this process does not
///        see.
/// \throws c10::ValueError  for another `nprocs`, an empty `body`, or an option out of its range.
/// \throws c10::Error  with the text of the first rank that failed: what `body` threw there, its
///         exit code or signal, and what became of the others. Before any rank has started: this
///         process has several threads, or is a rank itself (`body` calls spawn; ddprun or torchrun
///         with several ranks started the program).
/// \throws std::system_error  when no process can be started.
///
/// Example:
/// ```
/// int main() {
///   ddp::spawn(2, [](int rank) {
///     ddp::init_process_group();
///     train(rank);
///   });
/// }
/// ```
///
/// Collective: no. Blocks: host. Threads: the only one of the process.
/// Cost: a fork a rank, and two small processes; 64 KiB of address space a rank.
/// Source: torch.multiprocessing.spawn, torch 2.11.0, which starts new interpreters, passes
/// arguments, sets no environment, and calls the function with the number of the process.
DDP_API void spawn(
    int nprocs, const std::function<void(int rank)>& body, const SpawnOptions& options = {});

}  // namespace ddp
