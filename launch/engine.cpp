#include "launch/engine.h"

#include <optional>

#include <ddp/internal/engines/launchers.h>
#include <ddp/internal/engines/process_signs.h>
#include <ddp/internal/engines/variables.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp::launch {
namespace {

using engines::SlurmStart;

constexpr std::chrono::seconds kJoinTimeout(300);
constexpr std::chrono::seconds kJoinTimeoutOfPods(1800);

/// The number of an engine's job, equal on all of its hosts and in no other job of the cluster.
///
/// Left out: SGE's JOB_ID, a name that others use as well, and AWS_BATCH_JOB_ID, another one on
/// each host. A SLURM job's steps have one number, for a script may start each host by an srun of
/// its own.
struct JobNumber {
  const char* variable;
  const char* element;  // of an array whose jobs have one number; nullptr: each has its own
  const char* unless;   // where this one is set, hosts have different numbers; nullptr: never
};

constexpr JobNumber kJobNumbers[] = {
    {"SLURM_JOB_ID_HET_GROUP_0", nullptr, nullptr},  // of a heterogeneous job's first component
    {"SLURM_JOB_ID", nullptr, "SLURM_HET_SIZE"},
    {"LSB_JOBID", "LSB_JOBINDEX", nullptr},
    {"PBS_JOBID", nullptr, nullptr},
    {"FLUX_JOB_ID", nullptr, nullptr},
};

Lookup lookup_in(const Variables& variables) {
  return [&variables](const std::string& name) -> std::optional<std::string> {
    const char* value = variables ? variables(name.c_str()) : nullptr;
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  };
}

/// The id is a word in a line.
bool is_word(const std::string& text) {
  return text.find_first_of(" \t\r\n/") == std::string::npos;
}

bool is_of_engine(const std::string& id) {
  return any_of(kJobNumbers, [&](const JobNumber& one) {
    return id.rfind(one.variable + std::string("="), 0) == 0;
  });
}

/// Whether this is the only process, although it has the number of a task: a shell, or a script.
bool is_shell_of_slurm(const Lookup& lookup) {
  const auto task = read_variable(lookup, engines::kSlurm.rank);
  if (!task) return false;
  // `srun -n 4 --pty bash` gives the terminal to the first task, and the other shells end at once.
  const bool has_terminal = task->value == "0" && read_variable(lookup, "SLURM_PTY_PORT");
  return has_terminal || engines::slurm_start(lookup) != SlurmStart::Srun;
}

std::string note_text(const Setting& found, const std::string& others, const std::string& remedy) {
  return str(
      found.name, "=", short_text(found.value), ": ", others,
      ", and each ddprun makes a world of its own. ", remedy,
      " Where this host alone is meant, give --standalone.");
}

/// Tells how to make the processes of a launcher the hosts of one world.
std::string numbered_by(const std::string& count, const std::string& number) {
  return str(
      "For one world: ddprun -n RANKS --nnodes ", count, " --node-rank ", number,
      " --rdzv-endpoint HOST0:29500 ./train.");
}

/// \return nothing: the launcher does not say how many processes there are.
std::optional<std::string> note_of_launcher(
    const engines::Launcher& launcher, const Lookup& lookup) {
  const auto size = engines::is(launcher, engines::kSlurm)
                        ? first_variable(lookup, engines::kSlurmTasks)
                        : read_variable(lookup, launcher.world_size);
  if (!size) return std::nullopt;
  const int count = ddp::number_in(size->value);
  if (count <= 1) return "";
  // WORLD_SIZE may be the number of ranks, of which each host is to have several.
  const bool counts_ranks = engines::is(launcher, engines::kByHand);
  return note_text(
      *size, str("this is one of ", count, " processes"),
      counts_ranks ? numbered_by("HOSTS", "R")
                   : numbered_by(std::to_string(count), str("$", launcher.rank)));
}

}  // namespace

std::chrono::seconds default_join_timeout(const Variables& variables) {
  const bool is_pod = read_variable(lookup_in(variables), "KUBERNETES_SERVICE_HOST").has_value();
  return is_pod ? kJoinTimeoutOfPods : kJoinTimeout;
}

std::string job_of_engine(const Variables& variables) {
  const auto lookup = lookup_in(variables);
  for (const auto& one : kJobNumbers) {
    const auto number = read_variable(lookup, one.variable);
    if (!number) continue;
    if (one.unless != nullptr && read_variable(lookup, one.unless)) return "";
    auto id = number->name + "=" + number->value;
    const auto element = one.element != nullptr ? read_variable(lookup, one.element) : std::nullopt;
    if (element) id += "." + element->value;
    return is_word(id) ? id : "";
  }
  return "";
}

bool is_same_job(const std::string& own, const std::string& other) {
  return own == other || (own == kUnknownJob && is_of_engine(other)) ||
         (other == kUnknownJob && is_of_engine(own));
}

std::string note_of_others(const Variables& variables) {
  const auto lookup = lookup_in(variables);
  const bool is_shell = is_shell_of_slurm(lookup);
  if (const auto* launcher = engines::innermost_launcher(lookup, is_shell)) {
    if (const auto note = note_of_launcher(*launcher, lookup)) return *note;
  }
  if (is_shell) return "";
  // ddprun takes PET_* variables as its options, and PMIX_RANK is also that of a single process.
  const auto signs = engines::find_process_signs([&](const std::string& name) {
    const bool is_passed_over = name.rfind("PET_", 0) == 0 || name == "PMIX_RANK";
    return is_passed_over ? std::nullopt : lookup(name);
  });
  if (const auto& sign = signs.certain) {
    return note_text(sign->found, "there are " + sign->meaning, sign->remedy);
  }
  const auto rank = read_variable(lookup, "PMIX_RANK");
  if (!rank || ddp::number_in(rank->value) == 0) return "";
  return note_text(*rank, "there are several processes", numbered_by("HOSTS", "$PMIX_RANK"));
}

}  // namespace ddp::launch
