#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>

namespace ddp {

/// Looks one variable up, as getenv does.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

/// A value and where it came from, for error messages: "SLURM_PROCID", "world_size()".
struct Setting {
  std::string name;
  std::string value;
};

struct Range {
  int min;
  int max = std::numeric_limits<int>::max();
};

/// The setting's value as a whole number.
///
/// \param remedy  what to do about a bad one, for the message.
/// \param place  " on rank 1 of 2", where that is known.
/// \throws c10::ValueError  when it is none, or not in the range.
int parse_int(
    const Setting& setting, const Range& range, const std::string& remedy,
    const std::string& place = "");

/// The remedy for what a launcher sets.
constexpr const char* kLauncherRemedy =
    "Correct it, or start the program with ddprun, torchrun, mpirun or srun, which set it.";

constexpr int kMaxPort = 65535;

/// What a launcher told this process, as it stands there: checked where it is used, so that a
/// malformed variable nobody needs harms nobody.
struct Environment {
  std::optional<Setting> rank;
  std::optional<Setting> world_size;
  std::optional<Setting> local_rank;
  std::optional<Setting> local_world_size;
  std::optional<Setting> master_addr;
  std::optional<Setting> master_port;
  /// No launcher has started this process: none of the variables is set by which one could be told.
  bool alone = false;
  /// Where rank and world size were looked for, for the message that they are missing.
  std::string rank_name = "RANK";
  std::string world_size_name = "WORLD_SIZE";
  /// What to do when the address or the port is missing; a sentence.
  std::string address_remedy;
  /// torchrun's agent already listens at master_addr:master_port.
  bool agent_store = false;
  /// Which of torchrun's attempts this is, over a store that outlives them. Only where one agent
  /// has started all ranks: with several, each counts the failures of its own ranks, so that the
  /// ranks of one attempt have different counts.
  std::optional<Setting> attempt;
  /// GLOO_SOCKET_IFNAME: names of interfaces, separated by commas.
  std::optional<Setting> gloo_interfaces;
};

/// Reads what the innermost launcher says. Pure, apart from `lookup`.
///
/// The innermost one is right, because it sets its variables last and the outer ones' are
/// inherited, often the same in all its processes. torchrun and ddprun (RANK) run inside the
/// others, and mpirun (OMPI_COMM_WORLD_RANK) inside a SLURM job, so: RANK, then Open MPI, then
/// SLURM. MASTER_ADDR and MASTER_PORT go before what is derived. That is
///
/// - Open MPI, all ranks on one host: 127.0.0.1, and a port from the job's name (PMIX_NAMESPACE,
///   else OMPI_MCA_ess_base_jobid): 10000 + its FNV-1a hash mod 20000.
/// - SLURM: the first host of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST or SLURM_NODELIST, else
///   SLURM_LAUNCH_NODE_IPADDR, and port 10000 + the FNV-1a hash of "SLURM_JOB_ID.SLURM_STEP_ID" mod
///   20000.
///
/// Derived ports stay below 30000, so no connection's own port takes them (32768 and up on Linux).
Environment read_environment(const Lookup& lookup);

/// The first host of a SLURM node list: "n[07-09,12],login" gives "n07". Empty for a malformed one.
std::string first_slurm_host(const std::string& node_list);

/// The environment of this process.
std::optional<std::string> process_variable(const std::string& name);

}  // namespace ddp
