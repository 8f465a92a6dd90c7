// ddprun's part of ddp::spawn(): the same supervisor, for ranks that call a function. Without
// LibTorch.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ddp::launch {

/// The limit of one host's ranks; a larger number is more likely a typo than a machine.
constexpr int kMaxLocalRanks = 1024;

/// As ddprun's options.
struct ForkOptions {
  int ranks = 1;
  std::optional<std::chrono::milliseconds> grace;
  bool prefix = true;
  int max_restarts = 0;
  std::string log_dir;
  std::optional<int> omp_threads;
};

/// How the ranks have ended.
struct RanksEnded {
  struct Failed {
    std::string rank;                   // "rank 1 (pid 13)"
    std::string how;                    // "exited with code 1"
    std::optional<std::string> thrown;  // the text of the exception; none: it threw none
  };
  int code = 0;                      // as ddprun's
  std::optional<Failed> failed;      // the first one; none: a signal ended the job, or the launcher
  std::string signal;                // the first that asked this process to end; "": none
  std::vector<std::string> remarks;  // other lines that ddprun would write
};

/// Runs a function on ranks, each in a copy of this process, until all of these have ended and no
/// process that they have started is left.
///
/// The ranks end by _exit(), with what C's and C++'s standard streams hold written, and neither
/// functions of atexit() nor destructors of static objects run in them. They are below a process
/// that guards and one that supervises, as ddprun's are. Signals that come to this process go to
/// the ranks, and, if they ask for the end, once more to this process when the ranks have ended.
/// Afterwards this process has the signals, descriptors and children that it had before.
///
/// Must be called while the process has one thread.
///
/// \throws std::system_error  when the first process cannot be started.
RanksEnded fork_ranks(const ForkOptions& options, const std::function<void(int rank)>& body);

/// Counts the threads of this process; 0: unknown.
int count_threads();

}  // namespace ddp::launch
