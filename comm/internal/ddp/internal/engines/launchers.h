// The launchers that number the processes which they start. Without LibTorch, for ddprun looks
// whether one of them started it.
#pragma once

#include <array>

#include <ddp/internal/engines/variables.h>

namespace ddp::engines {

/// The variables in which a launcher tells a process its place. nullptr: it has none for that.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  /// Without it the others are another launcher's, which has the same ones. nullptr: needs none.
  const char* mark = nullptr;
  /// The number of hosts, where local_world_size does not show that there is one.
  const char* hosts = nullptr;
  /// Equal on all ranks of a job and different between jobs, the first that is set: for a port.
  std::array<const char*, 2> job = {};
  /// Advice for a missing address, where it is more than MASTER_ADDR and MASTER_PORT.
  const char* remedy = nullptr;
};

inline constexpr Launcher kByHand{
    "ddprun or torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
inline constexpr Launcher kOpenMpi{
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    nullptr,
    nullptr,
    {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
    "mpirun says nothing of rank 0's host: pass -x MASTER_ADDR=<rank 0's host> "
    "-x MASTER_PORT=<a free port there>."};
// MPICH's launcher, and those of its kin. srun may set PMI_RANK as well, but not MPI_LOCALRANKID.
inline constexpr Launcher kHydra{
    "mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    nullptr,
    {},
    "mpiexec says nothing of rank 0's host: pass -genv MASTER_ADDR <rank 0's host> "
    "-genv MASTER_PORT <a free port there>, or use init_method(\"mpi://\")."};
// The older name second.
using Names = std::array<const char*, 2>;
inline constexpr Names kSlurmJob{"SLURM_JOB_ID", "SLURM_JOBID"};
inline constexpr Names kSlurmStep{"SLURM_STEP_ID", "SLURM_STEPID"};
inline constexpr Names kSlurmTasks{"SLURM_NTASKS", "SLURM_NPROCS"};
inline constexpr Names kSlurmTasksPerNode{"SLURM_NTASKS_PER_NODE"};
inline constexpr Names kSlurmNodes{"SLURM_JOB_NUM_NODES", "SLURM_NNODES"};
inline constexpr Launcher kSlurm{
    "srun",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    nullptr,
    nullptr,
    nullptr,
    {},
    "Inside a SLURM job, start the program with srun, or set MASTER_ADDR and MASTER_PORT."};

/// The innermost first. Each runs inside those below it, whose variables its processes inherit.
inline constexpr Launcher kLaunchers[] = {
    kByHand,
    kOpenMpi,
    kHydra,
    {"mpirun_rsh",
     "MV2_COMM_WORLD_RANK",
     "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE",
     nullptr,
     nullptr,
     {"MPIRUN_ID"}},
    {"horovodrun",
     "HOROVOD_RANK",
     "HOROVOD_SIZE",
     "HOROVOD_LOCAL_RANK",
     "HOROVOD_LOCAL_SIZE",
     nullptr,
     nullptr,
     {"HOROVOD_GLOO_RENDEZVOUS_PORT"}},
    {"flux run",
     "FLUX_TASK_RANK",
     "FLUX_JOB_SIZE",
     "FLUX_TASK_LOCAL_ID",
     nullptr,
     nullptr,
     "FLUX_JOB_NNODES",
     {"FLUX_JOB_ID"}},
    {"jsrun",
     "JSM_NAMESPACE_RANK",
     "JSM_NAMESPACE_SIZE",
     "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE",
     nullptr,
     nullptr,
     {"PMIX_NAMESPACE", "LSB_JOBID"}},
    {"PALS' mpiexec",
     "PALS_RANKID",
     "PMI_SIZE",
     "PALS_LOCAL_RANKID",
     "PALS_LOCAL_SIZE",
     nullptr,
     nullptr,
     {"PALS_APID", "PBS_JOBID"}},
    kSlurm,
    {"a launcher with PMI",
     "PMI_RANK",
     "PMI_SIZE",
     "PMI_LOCAL_RANK",
     "PMI_LOCAL_SIZE",
     nullptr,
     nullptr,
     {"PMI_JOBID"}},
};

inline bool is(const Launcher& one, const Launcher& other) { return one.name == other.name; }

/// How a process came to have SLURM_PROCID.
enum class SlurmStart {
  Srun,
  Salloc,  // a program in the shell that salloc opens in a step of its own
  Sbatch,  // the script, which runs once, with the variables of the first task
};

inline SlurmStart slurm_start(const Lookup& lookup) {
  // slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT.
  constexpr const char *kInteractiveStep = "4294967290", *kBatchStep = "4294967291";
  const auto step = first_variable(lookup, kSlurmStep);
  if (step && step->value == kInteractiveStep) return SlurmStart::Salloc;
  const auto task = read_variable(lookup, kSlurm.rank);
  const bool is_script = step ? step->value == kBatchStep : task && task->value == "0";
  return is_script ? SlurmStart::Sbatch : SlurmStart::Srun;
}

/// Finds the innermost launcher that has numbered this process.
///
/// \param without_slurm  passes SLURM's numbers over, and with them what lies further out: in a
/// shell
///        SLURM sets what its plugin for MPI sets, too.
inline const Launcher* innermost_launcher(const Lookup& lookup, bool without_slurm) {
  for (const auto& launcher : kLaunchers) {
    if (without_slurm && is(launcher, kSlurm)) return nullptr;
    if (launcher.mark != nullptr && !lookup(launcher.mark)) continue;
    if (read_variable(lookup, launcher.rank)) return &launcher;
  }
  return nullptr;
}

}  // namespace ddp::engines
