// How groups over MPI start, and where ranks meet.
#include <mpi.h>

#include <cstdio>

#include "mpi/world.h"

namespace mpi_world {
namespace {

/// The error of a group that must not come about.
void print_error_of_group() {
  try {
    group_over("mpi", 60s);
  } catch (const c10::Error& error) {
    std::printf("error: %s\n", error.what_without_backtrace());
    return;
  }
  require(false, "a group was made");
}

void initialize(int level) {
  int got = 0;
  MPI_Init_thread(nullptr, nullptr, level, &got);
  require(got >= level, "MPI gives another level of threads");
}

}  // namespace

void again() {
  for (int i = 0; i < 3; ++i) {
    ddp::init_process_group(ProcessGroupOptions().backend("mpi").timeout(180s));
    auto tensor = at::arange(3);
    ddp::all_reduce(tensor);
    require_equal(tensor, at::arange(3) * ddp::get_world_size(), "the sum");
    ddp::destroy_process_group();
  }
}

void meet_for_others() {
  for (const auto* backend : {"gloo", "shm", "mpi"}) {
    const auto group = group_over(backend);
    auto tensor = at::arange(1000) + group->getRank();
    ddp::all_reduce(tensor, Op::MAX, group);
    require_equal(tensor, at::arange(1000) + group->getSize() - 1, backend);
  }
}

void wrong_options() {
  try {
    ddp::make_process_group(ProcessGroupOptions().backend("mpi").rank(0).world_size(7));
  } catch (const c10::Error& error) {
    std::printf("error: %s\n", error.what_without_backtrace());
    return;
  }
  require(false, "a group was made");
}

void alone() {
  const auto group = group_over("mpi");
  require(group->getSize() == 1, "this is not a world of one");
  auto tensor = at::arange(5);
  ddp::all_reduce(tensor, Op::SUM, group);
  require_equal(tensor, at::arange(5), "the sum of one rank");
}

void initialized_multiple() {
  initialize(MPI_THREAD_MULTIPLE);
  again();
  int is_over = 1;
  MPI_Finalized(&is_over);
  require(is_over == 0, "ddp has finalized what it has not initialised");
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  print_error_of_group();
}

void initialized_single() {
  initialize(MPI_THREAD_SINGLE);
  print_error_of_group();
  MPI_Finalize();
}

}  // namespace mpi_world
