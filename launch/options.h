#pragma once

#include <chrono>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ddp/internal/system/host.h>

#include "launch/pet_variables.h"
#include "launch/pretend/settings.h"

namespace ddp::launch {

class RankFunction;

/// The options of a job that replaces single ranks.
struct ElasticOptions {
  int min_ranks = 0;    // 0: all
  int max_ranks = 0;    // 0: those of all hosts
  int first_ranks = 0;  // to begin with; 0: max_ranks
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

/// The hosts on which this ddprun starts one each, by a program such as ssh.
struct HostsOptions {
  std::vector<std::string> names;      // as that program takes them
  std::vector<std::string> rsh;        // it, with its own arguments
  std::vector<std::string> variables;  // passed on beside those that always are
};

struct LaunchOptions {
  int local_ranks = 1;              // on this host
  std::vector<int> ranks_of_nodes;  // on each host, where they differ; empty: local_ranks on all
  int nodes = 1;
  int node_rank = 0;        // -1: the first host says which, in a rendezvous
  bool rendezvous = false;  // hosts get their numbers at the endpoint, as they come
  std::optional<bool>
      is_first_host;  // of a rendezvous; unset: the host with the endpoint's address
  std::chrono::seconds join_timeout{300};  // how long hosts that agree wait for each other at first
  std::optional<HostsOptions> hosts;       // unset: the ranks are on this host
  bool obeys_stdin = false;                // another ddprun writes orders to it: see Orders
  std::string master_addr = loopback_address();
  int master_port = 0;             // 0: ddprun reserves a free one
  std::optional<int> omp_threads;  // unset: the environment's, or an even share of the cores
  std::optional<std::chrono::milliseconds> grace;  // unset: depends on why the job ends
  bool prefix = true;
  int max_restarts = 0;
  std::optional<ElasticOptions> elastic;    // unset: a failure ends or restarts all ranks
  std::string log_dir;                      // empty: none
  std::string job_id;                       // keeps other jobs' hosts out; empty: ddprun chooses
  std::vector<std::string> command;         // the program and its arguments
  std::optional<PretendedWorld> pretended;  // unset: all ranks are real
  CallsOptions calls;
  RankFunction* function = nullptr;  // what ranks run in its place, in copies of this process
};

/// Whether the job has no ranks here: this process only coordinates those of other hosts.
inline bool only_coordinates(const LaunchOptions& options) {
  return options.command.empty() && options.function == nullptr;
}

/// The hosts whose ddpruns decide together. Without --max-restarts, --elastic or a rendezvous there
/// is nothing to decide, and each one runs its ranks alone.
inline int hosts_that_agree(const LaunchOptions& options) {
  const bool agree = options.elastic || options.max_restarts > 0 || options.rendezvous;
  return agree ? options.nodes : 1;
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
/// \param err  receives errors, one line each, naming option or variable, rule and value; and a
///        line for each option of torchrun that has no meaning here.
/// \param variables  the environment; empty: none.
ParsedOptions parse_options(
    int argc, const char* const* argv, std::ostream& out, std::ostream& err,
    const Variables& variables = {});

}  // namespace ddp::launch
