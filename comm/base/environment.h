#pragma once

#include <limits>
#include <optional>
#include <string>

#include <ddp/internal/engines/variables.h>

namespace ddp {

struct Range {
  int min;
  int max = std::numeric_limits<int>::max();
};

/// Parses the setting's value as a whole number.
///
/// \param remedy  advice for the message about a bad value.
/// \param place  " on rank 1 of 2" if known.
/// \throws c10::ValueError  if it is not a whole number, or not in the range.
int parse_int(
    const Setting& setting, const Range& range, const std::string& remedy,
    const std::string& place = "");

/// The remedy for a variable that a launcher sets.
constexpr const char* kLauncherRemedy =
    "Correct it, or start the program with ddprun, torchrun, mpirun or srun, which set it.";

constexpr int kMaxPort = 65535;

/// The variables that a launcher set for this process, unparsed: each is checked where it is used,
/// so that a malformed variable that is not needed does no harm.
struct Environment {
  std::optional<Setting> rank;
  std::optional<Setting> world_size;
  std::optional<Setting> local_rank;
  std::optional<Setting> local_world_size;
  std::optional<Setting> master_addr;
  std::optional<Setting> master_port;
  /// No launcher has started this process: no variable that a launcher sets is set.
  bool no_launcher = false;
  /// The variable for which no_launcher is false, for the message that others are missing.
  std::optional<Setting> sign;
  /// Why rank and world size cannot be taken from here, although there are several processes; a
  /// text for an error. Empty: no such reason.
  std::string problem;
  /// Why this process may be one of several, although it seems to be alone. Empty: no reason.
  std::string doubt;
  /// The variables in which rank and world size were looked up, for the message that they are
  /// missing.
  std::string rank_name = "RANK";
  std::string world_size_name = "WORLD_SIZE";
  /// Advice for a missing address or port; a sentence.
  std::string address_remedy;
  /// The number of a socket to a process that has started all ranks, without a master_port: see
  /// port_of_launcher().
  std::optional<Setting> launcher_socket;
  /// Hosts may get their names while the ranks already wait: in Kubernetes.
  bool names_come_late = false;
  /// torchrun's agent already listens at master_addr:master_port.
  bool agent_store = false;
  /// The number of torchrun's attempt, over a store that outlives attempts. Only set if one agent
  /// has started all ranks: with several, each counts the failures of its own ranks, so that the
  /// ranks of one attempt have different counts.
  std::optional<Setting> attempt;
  /// GLOO_SOCKET_IFNAME: names of interfaces, separated by commas.
  std::optional<Setting> gloo_interfaces;
};

/// Reads the variables of the innermost launcher. Pure, apart from `lookup`.
///
/// The innermost launcher is right, because it sets its variables last and processes inherit the
/// outer ones', which are often the same in all of them. engines/launchers.h has a table of
/// launchers, the innermost first: torchrun and ddprun (RANK) run inside the others, and mpirun
/// (OMPI_COMM_WORLD_RANK; PMI_RANK for MPICH's) inside a SLURM job. MASTER_ADDR and MASTER_PORT
/// take precedence over derived values, which are
///
/// - All ranks on one host: 127.0.0.1, and a port from what names the job: 10000 + its FNV-1a hash
///   mod 20000. For Open MPI that is PMIX_NAMESPACE, else OMPI_MCA_ess_base_jobid.
/// - Open MPI over several hosts of a SLURM job: the first host of SLURM_JOB_NODELIST.
/// - SLURM: the first host of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST or SLURM_NODELIST, else
///   SLURM_LAUNCH_NODE_IPADDR, and port 10000 + the FNV-1a hash of "SLURM_JOB_ID.SLURM_STEP_ID" mod
///   20000.
///
/// Derived ports stay below 30000, so no connection's own port takes them (32768 and up on Linux).
///
/// Where no launcher is known, a second table has variables that say that there are several
/// processes or hosts. Then each process would train alone and write to the same folder, so the
/// result has a problem, or a doubt.
Environment read_environment(const Lookup& lookup);

/// The port that the ranks of one host derive from the process that started all of them.
///
/// \param socket  its other end is that process's.
/// \return  nothing if it is no such socket.
std::optional<Setting> port_of_launcher(const Setting& socket);

/// The first host of a SLURM node list: "n[07-09,12],login" gives "n07". Empty for a malformed one.
std::string first_slurm_host(const std::string& node_list);

std::optional<std::string> process_variable(const std::string& name);

}  // namespace ddp
