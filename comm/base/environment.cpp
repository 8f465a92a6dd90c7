#include "base/environment.h"

#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include <ddp/internal/check.h>
#include <ddp/internal/engines/launchers.h>
#include <ddp/internal/engines/process_signs.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using engines::is, engines::kByHand, engines::kHydra, engines::kLaunchers, engines::kOpenMpi,
    engines::kSlurm;
using engines::kSlurmJob, engines::kSlurmNodes, engines::kSlurmStep, engines::kSlurmTasks,
    engines::kSlurmTasksPerNode;
using engines::Launcher, engines::SlurmStart, engines::slurm_start;

constexpr uint64_t kFirstPort = 10000;
constexpr uint64_t kPorts = 20000;

std::string derived_port(const std::string& job) {
  return std::to_string(kFirstPort + fnv1a(job) % kPorts);
}

bool is_one_host(const Environment& environment) {
  return environment.local_world_size && environment.world_size &&
         environment.local_world_size->value == environment.world_size->value;
}

void read_torchrun(const Lookup& lookup, Environment& environment) {
  const auto agent = lookup("TORCHELASTIC_USE_AGENT_STORE");
  environment.agent_store = agent && *agent == "True";
  if (environment.agent_store && is_one_host(environment)) {
    environment.attempt = read_variable(lookup, "TORCHELASTIC_RESTART_COUNT");
  }
  // Kubeflow numbers pods by RANK, and means ddprun or torchrun to start several ranks in each.
  const auto in_each = read_variable(lookup, "PET_NPROC_PER_NODE");
  if (in_each && number_in(in_each->value) > 1 && !read_variable(lookup, "LOCAL_RANK")) {
    environment.problem = ddp::str(
        "init_process_group: expected LOCAL_RANK in the environment beside PET_NPROC_PER_NODE=\"",
        in_each->value, "\", got nothing, so RANK numbers the pod and not this process. ",
        engines::kDdprunTakesPet);
  }
}

/// Derives the port from what names the job.
void derive_port(
    const Lookup& lookup, const Launcher& launcher, bool on_one_host, Environment& environment) {
  if (is(launcher, kHydra) && on_one_host) {
    environment.launcher_socket = read_variable(lookup, "PMI_FD");
  }
  const auto job = first_variable(lookup, launcher.job);
  if (job) environment.master_port = Setting{job->name, derived_port(job->value)};
}

/// For launchers that say nothing of rank 0's host. It is known where there is one host, and in a
/// SLURM job, over whose hosts Open MPI spreads the ranks in the order of its list; Hydra, which
/// does so too, has no name of its own for a job, and two in an allocation would get one port.
void derive_address(const Lookup& lookup, const Launcher& launcher, Environment& environment) {
  const auto hosts =
      launcher.hosts != nullptr ? read_variable(lookup, launcher.hosts) : std::nullopt;
  const bool on_one_host = is_one_host(environment) || (hosts && hosts->value == "1");
  auto first = on_one_host ? Setting{"one host", loopback_address()} : std::optional<Setting>();
  if (!on_one_host && is(launcher, kOpenMpi)) {
    first = first_variable(lookup, {"SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (first) first->value = first_slurm_host(first->value);
  }
  if (!first) return;
  if (!environment.master_addr) environment.master_addr = std::move(first);
  if (!environment.master_port) derive_port(lookup, launcher, on_one_host, environment);
}

void derive_slurm_address(const Lookup& lookup, Environment& environment) {
  if (!environment.master_addr) {
    environment.master_addr =
        first_variable(lookup, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (environment.master_addr) {
      environment.master_addr->value = first_slurm_host(environment.master_addr->value);
    } else {
      environment.master_addr = read_variable(lookup, "SLURM_LAUNCH_NODE_IPADDR");
    }
  }
  const auto job = first_variable(lookup, kSlurmJob);
  if (!environment.master_port && job) {
    const auto step = first_variable(lookup, kSlurmStep);
    // Hashed, because a number modulo the number of ports would give one port to jobs whose numbers
    // differ by a multiple of it.
    environment.master_port =
        Setting{job->name, derived_port(job->value + "." + (step ? step->value : "0"))};
  }
}

/// Finds srun missing in a script: the process would wait for ranks that nobody starts.
std::string why_no_script(const Lookup& lookup) {
  const auto tasks = first_variable(lookup, kSlurmTasks);
  if (tasks && number_in(tasks->value) == 1) return "";  // others are limits beside it
  for (const auto& names : {kSlurmTasks, kSlurmTasksPerNode, kSlurmNodes}) {
    const auto found = first_variable(lookup, names);
    if (!found || number_in(found->value) == 1) continue;
    return ddp::str(
        "init_process_group: expected srun to start the ranks, got the batch script itself, which "
        "SLURM runs once: ",
        found->name, " is ", found->value,
        ", and this is no step of srun. Write srun ./train "
        "into the script, or ddprun -n RANKS ./train for ranks on one host.");
  }
  return "";
}

bool is_alone_in_slurm(const Lookup& lookup) {
  const auto start = slurm_start(lookup);
  const bool has_one_node =
      first_variable(lookup, kSlurmNodes).has_value() && why_no_script(lookup).empty();
  return start == SlurmStart::Salloc ||
         (start == SlurmStart::Sbatch && has_one_node && !first_variable(lookup, kSlurmTasks));
}

/// Finds the innermost launcher, and which of its variables shows it.
const Launcher* find_launcher(const Lookup& lookup, Environment& environment) {
  const auto finds = [&](const char* variable) {
    environment.sign = read_variable(lookup, variable);
    return environment.sign.has_value();
  };
  const auto* innermost = engines::innermost_launcher(lookup, is_alone_in_slurm(lookup));
  if (innermost != nullptr && finds(innermost->rank)) return innermost;
  for (const auto& launcher : kLaunchers) {
    // In salloc's shell there is the number of tasks that srun would start.
    if (is(launcher, kSlurm) || !finds(launcher.world_size)) continue;
    if (is(launcher, kByHand) || environment.sign->value != "1") return &launcher;
  }
  return nullptr;
}

/// Reads what has no rank and no world size.
void read_without_launcher(const Lookup& lookup, Environment& environment) {
  // SLURM sets what its plugin for MPI sets also in the shell, where no rank runs.
  const bool is_alone = is_alone_in_slurm(lookup);
  const auto signs = engines::find_process_signs([&](const std::string& name) {
    return is_alone && name == "PMIX_RANK" ? std::nullopt : lookup(name);
  });
  if (const auto& sign = signs.certain) {
    environment.problem = ddp::str(
        "init_process_group: expected RANK and WORLD_SIZE, or those of another launcher, in the "
        "environment, got only ",
        sign->found.name, "=\"", short_text(sign->found.value), "\", so there are ", sign->meaning,
        ". ", sign->remedy);
  }
  if (const auto& sign = signs.doubtful) {
    environment.doubt = ddp::str(
        "init_process_group: this process is a world of one rank, but with ", sign->found.name,
        "=\"", sign->found.value, "\" it may be the first of several that train alone. ",
        sign->remedy);
  }
  if (!environment.problem.empty()) return;
  environment.sign = first_variable(lookup, {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"});
  // Kubernetes sets MASTER_PORT=tcp://10.0.0.11:6379 for a service named master.
  const auto& port = environment.master_port;
  const bool is_service = port && port->value.rfind("tcp://", 0) == 0;
  if (!environment.sign && !is_service) environment.sign = port;
  environment.no_launcher = !environment.sign;
}

}  // namespace

int parse_int(
    const Setting& setting, const Range& range, const std::string& remedy,
    const std::string& place) {
  const auto bad = [&](const char* expectation) {
    DDP_CHECK_VALUE(
        false, setting.name, ": expected ", expectation,
        range.max == std::numeric_limits<int>::max()
            ? ddp::str(" of at least ", range.min)
            : ddp::str(" from ", range.min, " to ", range.max),
        ", got \"", setting.value, "\"", place, ". ", remedy);
  };
  int64_t number = 0;
  size_t used = 0;
  try {
    number = std::stoll(setting.value, &used);
  } catch (const std::logic_error&) {
    bad("a whole number");
  }
  if (used != setting.value.size()) bad("a whole number");
  if (number < range.min || number > range.max) bad("a number");
  return static_cast<int>(number);
}

Environment read_environment(const Lookup& lookup) {
  Environment environment;
  for (const auto& launcher : kLaunchers) {
    if (!environment.local_rank) {
      environment.local_rank = read_variable(lookup, launcher.local_rank);
    }
    if (!environment.local_world_size && launcher.local_world_size != nullptr) {
      environment.local_world_size = read_variable(lookup, launcher.local_world_size);
    }
  }
  environment.master_addr = read_variable(lookup, "MASTER_ADDR");
  environment.master_port = read_variable(lookup, "MASTER_PORT");
  environment.gloo_interfaces = read_variable(lookup, "GLOO_SOCKET_IFNAME");
  environment.names_come_late = read_variable(lookup, "KUBERNETES_SERVICE_HOST").has_value();
  environment.address_remedy =
      "Start the program with ddprun, torchrun, mpirun or srun, or set MASTER_ADDR and "
      "MASTER_PORT.";

  const auto* launcher = find_launcher(lookup, environment);
  if (launcher == nullptr) {
    read_without_launcher(lookup, environment);
    return environment;
  }
  environment.rank_name = launcher->rank;
  environment.rank = read_variable(lookup, launcher->rank);
  environment.world_size_name = launcher->world_size;
  environment.world_size = read_variable(lookup, launcher->world_size);
  if (launcher->remedy != nullptr) environment.address_remedy = launcher->remedy;
  if (is(*launcher, kByHand)) {
    read_torchrun(lookup, environment);
  } else if (is(*launcher, kSlurm)) {
    environment.world_size = first_variable(lookup, kSlurmTasks);
    if (slurm_start(lookup) == SlurmStart::Sbatch) environment.problem = why_no_script(lookup);
    derive_slurm_address(lookup, environment);
  } else {
    derive_address(lookup, *launcher, environment);
  }
  return environment;
}

std::optional<Setting> port_of_launcher(const Setting& socket) {
  const int fd = number_in(socket.value);
  ucred other{};
  socklen_t size = sizeof other;
  const bool known = fd > 0 && ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0;
  if (!known || other.pid <= 0) return std::nullopt;
  return Setting{socket.name, derived_port(ddp::str("process ", other.pid))};
}

std::string first_slurm_host(const std::string& node_list) {
  const auto stop = node_list.find_first_of(",[");
  if (stop == std::string::npos || node_list[stop] == ',') return node_list.substr(0, stop);

  // "prefix[first-last,...]rest": replace the bracket by its first number. `rest` may have another
  // bracket.
  const auto close = node_list.find(']', stop);
  if (close == std::string::npos) return "";
  const auto end = node_list.find_first_of("-,]", stop);
  const auto number = node_list.substr(stop + 1, end - stop - 1);
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (number.empty() || !all_of(number, is_digit)) return "";
  return first_slurm_host(node_list.substr(0, stop) + number + node_list.substr(close + 1));
}

std::optional<std::string> process_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace ddp
