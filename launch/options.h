#pragma once

#include <chrono>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ddp/internal/system/host.h>

#include "launch/pet_variables.h"

namespace ddp::launch {

/// The options of a job that replaces single ranks.
struct ElasticOptions {
  int min_ranks = 0;  // 0: all
  int max_ranks = 0;  // 0: nodes * local_ranks
  std::chrono::milliseconds lost_after{10000};
  std::chrono::milliseconds wait{600000};
  std::chrono::milliseconds hold{0};
  std::string coordinator;  // HOST:PORT/TOKEN of one that runs elsewhere; empty: none
  int coordinate = 0;       // run the coordinator alone, on this port; 0: no
  std::string token;        // empty: a random one, or with several hosts "job"
  std::string state;        // a file for a coordinator that is started again; empty: none
};

/// The grace period where the options have none.
constexpr std::chrono::milliseconds kGraceAfterFailure(3000);
constexpr std::chrono::milliseconds kGraceAfterSignal(5000);

struct LaunchOptions {
  int local_ranks = 1;  // on this host
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = loopback_address();
  int master_port = 0;             // 0: ddprun reserves a free one
  std::optional<int> omp_threads;  // unset: the environment's, or an even share of the cores
  std::optional<std::chrono::milliseconds> grace;  // unset: depends on why the job ends
  bool prefix = true;
  int max_restarts = 0;
  std::optional<ElasticOptions> elastic;  // unset: a failure ends or restarts all ranks
  std::string log_dir;                    // empty: none
  std::vector<std::string> command;       // the program and its arguments; empty: only coordinates
};

/// The hosts whose ddpruns decide together. Without --max-restarts or --elastic there is nothing to
/// decide, and each one runs its ranks alone.
inline int hosts_that_agree(const LaunchOptions& options) {
  return options.elastic || options.max_restarts > 0 ? options.nodes : 1;
}

/// Options to launch with, or the exit code when there is nothing to launch.
struct ParsedOptions {
  std::optional<LaunchOptions> options;
  int exit_code = 0;
};

/// Exit code of a command line that cannot be followed.
constexpr int kBadUsage = 2;

/// Reads ddprun's command line, and the PET_* variables for what it lacks.
///
/// The first argument that is no option of ddprun, or that follows a `--`, begins the program and
/// its arguments, which are passed on unchanged.
///
/// \param out  receives --help and --version.
/// \param err  receives errors, one line each, naming option or variable, rule and value.
/// \param variables  the environment; empty: none.
ParsedOptions parse_options(
    int argc, const char* const* argv, std::ostream& out, std::ostream& err,
    const Variables& variables = {});

}  // namespace ddp::launch
