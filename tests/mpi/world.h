// Ranks over MPI, which mpirun starts: the cases of mpi_world, and what they share.
#pragma once

#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>

namespace mpi_world {

using namespace std::chrono_literals;
using ddp::ProcessGroup;
using ddp::ProcessGroupOptions;
using Op = c10d::ReduceOp;

inline ProcessGroup group_over(
    const std::string& backend, std::chrono::milliseconds timeout = 180s) {
  return ddp::make_process_group(
      ProcessGroupOptions().backend(backend).init_method("mpi://").timeout(timeout));
}

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline void require_equal(
    const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  require(got.sizes() == expected.sizes() && at::equal(got, expected), what + " differs");
}

// Each throws, or prints FAILED and lines about it, if something is not as it should be.

/// Every collective, in every dtype, beside shared memory's, which adds in the same order.
void compare_collectives();
/// The sums of numbers that are rounded have the bits of shared memory's, which adds in the same
/// order. On one host: between hosts shared memory adds in another.
void compare_rounding();
/// Messages and tensors of more bytes than an int counts. By hand: takes 11 GB on two ranks.
void huge();

/// Several groups in one process, one after another.
void again();
/// Ranks of other backends, which meet over MPI.
void meet_for_others();
/// rank() and world_size() that are not MPI's.
void wrong_options();
/// Started without mpirun: a world of one.
void alone();
/// The program has initialised MPI itself, at a level of threads.
void initialized_multiple();
void initialized_single();

/// Ranks call different things: every rank names them.
void different();
/// Two ranks exchange parts that the receiver expects longer.
void splits();
/// The last rank is stopped, and the others end with an exception.
void stopped();
/// The last rank never calls the collective.
void late();
/// The last rank is killed in a collective.
void killed();

/// Trains as tests/mpi/wrapper_runs.py does. `backend`: any; init_method is env:// but for mpi.
void train_as_python(const std::string& backend);

}  // namespace mpi_world
