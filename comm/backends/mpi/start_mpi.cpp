#include "backends/mpi/start_mpi.h"

#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>

namespace ddp::backends::mpi {
namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

const char* to_text(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

void initialize(bool& initialized_here) {
  check_not_finalized();
  int is_running = 0;
  check_mpi(MPI_Initialized(&is_running), "MPI_Initialized");
  int level = MPI_THREAD_SINGLE;
  if (is_running == 0) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    initialized_here = true;
    return;
  }
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  DDP_CHECK(
      level == MPI_THREAD_MULTIPLE,
      "backend mpi: expected MPI_THREAD_MULTIPLE, for the program has initialised MPI itself, got ",
      to_text(level), ". Call MPI_Init_thread with it, or leave it to ddp.");
}

/// The launcher's number of ranks: a variable and its value. An MPI's own
/// comes first, for the other's may be left from a job around this one.
std::optional<std::pair<std::string, std::string>> ranks_of_launcher() {
  std::vector<const char*> names{"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
  if (variable("SLURM_PROCID") != nullptr) names.push_back("SLURM_STEP_NUM_TASKS");
  for (const auto* name : names) {
    if (const char* said = variable(name)) return std::pair<std::string, std::string>{name, said};
  }
  return std::nullopt;
}

/// Compares with what the launcher says: a launcher of another MPI starts worlds of one.
void check_size(const World& world) {
  const auto said = ranks_of_launcher();
  if (!said || said->second == std::to_string(world.size)) return;
  const bool is_open_mpi = world.library.find("Open MPI") != std::string::npos;
  DDP_CHECK(
      false, "backend mpi: expected MPI to count ", said->second, " ranks, as ", said->first,
      " says, got ", world.size, ". This program has ", world.library,
      ", the launcher is of another MPI: use mpiexec.", is_open_mpi ? "openmpi" : "mpich",
      ", or srun --mpi with a kind that this MPI knows.");
}

}  // namespace

void check_launcher() {
  const char* size = variable("WORLD_SIZE");
  if (size == nullptr || std::string(size) == "1") return;
  for (const auto* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"}) {
    if (variable(name) != nullptr) return;
  }
  int is_running = 0;
  check_mpi(MPI_Initialized(&is_running), "MPI_Initialized");
  DDP_CHECK(
      is_running != 0,
      "backend mpi: expected mpirun, mpiexec or srun to start the ranks, got WORLD_SIZE ", size,
      " and no variable of theirs. Run mpirun -n ", size, " PROGRAM, or use another backend.");
}

bool is_finalized() {
  int is_over = 0;
  check_mpi(MPI_Finalized(&is_over), "MPI_Finalized");
  return is_over != 0;
}

void check_not_finalized() {
  DDP_CHECK(
      !is_finalized(),
      "backend mpi: expected a program that uses MPI until it exits, got one that has called "
      "MPI_Finalize. Call it after the last group is destroyed, or leave it to ddp.");
}

World start_mpi(bool& initialized_here) {
  check_launcher();
  initialize(initialized_here);
  World world;
  world.library = library_version();
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &world.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world.size), "MPI_Comm_size");
  check_size(world);
  if (initialized_here) {
    check_mpi(
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world.communicator), "MPI_Comm_dup");
  check_mpi(
      MPI_Comm_set_errhandler(world.communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int* most_tag = nullptr;
  int has_most_tag = 0;
  check_mpi(
      MPI_Comm_get_attr(world.communicator, MPI_TAG_UB, &most_tag, &has_most_tag),
      "MPI_Comm_get_attr");
  if (has_most_tag != 0) world.most_tag = *most_tag;
  return world;
}

}  // namespace ddp::backends::mpi
