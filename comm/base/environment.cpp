#include "base/environment.h"

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr uint64_t kFirstPort = 10000;
constexpr uint64_t kPorts = 20000;

std::optional<Setting> read(const Lookup& lookup, const std::string& name) {
  auto value = lookup(name);
  if (!value || value->empty()) return std::nullopt;
  return Setting{name, std::move(*value)};
}

std::optional<Setting> read_first(const Lookup& lookup, std::initializer_list<const char*> names) {
  for (const auto* name : names) {
    if (auto setting = read(lookup, name)) return setting;
  }
  return std::nullopt;
}

std::string derived_port(uint64_t number) { return std::to_string(kFirstPort + number % kPorts); }

bool is_one_host(const Environment& environment) {
  return environment.local_world_size && environment.world_size &&
         environment.local_world_size->value == environment.world_size->value;
}

void read_torchrun(const Lookup& lookup, Environment& environment) {
  const auto agent = lookup("TORCHELASTIC_USE_AGENT_STORE");
  environment.agent_store = agent && *agent == "True";
  if (environment.agent_store && is_one_host(environment)) {
    environment.attempt = read(lookup, "TORCHELASTIC_RESTART_COUNT");
  }
}

void read_open_mpi(const Lookup& lookup, Environment& environment) {
  environment.rank_name = "OMPI_COMM_WORLD_RANK";
  environment.world_size_name = "OMPI_COMM_WORLD_SIZE";
  environment.world_size = read(lookup, environment.world_size_name);
  environment.address_remedy =
      "mpirun says nothing of rank 0's host: pass -x MASTER_ADDR=<rank 0's host> "
      "-x MASTER_PORT=<a free port there>.";
  const auto job = read_first(lookup, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  if (!is_one_host(environment)) return;
  if (!environment.master_addr) environment.master_addr = Setting{"one host", loopback_address()};
  if (!environment.master_port && job) {
    environment.master_port = Setting{job->name, derived_port(fnv1a(job->value))};
  }
}

// MPICH's launcher, and those of its kin.
void read_hydra(const Lookup& lookup, Environment& environment) {
  environment.rank_name = "PMI_RANK";
  environment.world_size_name = "PMI_SIZE";
  environment.world_size = read(lookup, environment.world_size_name);
  environment.address_remedy =
      "mpiexec says nothing of rank 0's host: pass -genv MASTER_ADDR <rank 0's host> "
      "-genv MASTER_PORT <a free port there>, or use init_method(\"mpi://\").";
}

void read_slurm(const Lookup& lookup, Environment& environment) {
  environment.rank_name = "SLURM_PROCID";
  environment.world_size_name = "SLURM_NTASKS";
  environment.world_size = read_first(lookup, {"SLURM_NTASKS", "SLURM_NPROCS"});
  environment.address_remedy =
      "Inside a SLURM job, start the program with srun, or set MASTER_ADDR and MASTER_PORT.";
  if (!environment.master_addr) {
    environment.master_addr =
        read_first(lookup, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (environment.master_addr) {
      environment.master_addr->value = first_slurm_host(environment.master_addr->value);
    } else {
      environment.master_addr = read(lookup, "SLURM_LAUNCH_NODE_IPADDR");
    }
  }
  const auto job = read_first(lookup, {"SLURM_JOB_ID", "SLURM_JOBID"});
  if (!environment.master_port && job) {
    const auto step = read_first(lookup, {"SLURM_STEP_ID", "SLURM_STEPID"});
    // Hashed, because a number modulo the number of ports would give one port to jobs whose numbers
    // differ by a multiple of it.
    environment.master_port =
        Setting{job->name, derived_port(fnv1a(job->value + "." + (step ? step->value : "0")))};
  }
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
  environment.no_launcher = !read_first(
      lookup, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
               "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
               "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOBID"});
  environment.local_rank = read_first(
      lookup, {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"});
  environment.local_world_size =
      read_first(lookup, {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  environment.master_addr = read(lookup, "MASTER_ADDR");
  environment.master_port = read(lookup, "MASTER_PORT");
  environment.gloo_interfaces = read(lookup, "GLOO_SOCKET_IFNAME");
  environment.address_remedy =
      "Start the program with ddprun, torchrun, mpirun or srun, or set MASTER_ADDR and "
      "MASTER_PORT.";

  environment.rank = read_first(lookup, {"RANK", "OMPI_COMM_WORLD_RANK"});
  // srun may set PMI_RANK as well, but not MPI_LOCALRANKID.
  if (!environment.rank && lookup("MPI_LOCALRANKID")) environment.rank = read(lookup, "PMI_RANK");
  if (!environment.rank) environment.rank = read(lookup, "SLURM_PROCID");
  if (environment.rank && environment.rank->name == "OMPI_COMM_WORLD_RANK") {
    read_open_mpi(lookup, environment);
  } else if (environment.rank && environment.rank->name == "PMI_RANK") {
    read_hydra(lookup, environment);
  } else if (environment.rank && environment.rank->name == "SLURM_PROCID") {
    read_slurm(lookup, environment);
  } else {
    environment.world_size = read(lookup, "WORLD_SIZE");
    read_torchrun(lookup, environment);
  }
  return environment;
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
