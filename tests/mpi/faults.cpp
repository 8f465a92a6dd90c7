// Ranks over MPI that fail, each with an error on the others.
#include <signal.h>

#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "mpi/world.h"

namespace mpi_world {
namespace {

/// Prints the error of a collective that cannot end, and after what time it came.
void print_error(const ProcessGroup& mpi, at::Tensor tensor) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    ddp::all_reduce(tensor, Op::SUM, mpi);
  } catch (const c10::Error& error) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf(
        "rank %d after %.1f s: %s\n", mpi->getRank(), took.count(), error.what_without_backtrace());
    std::fflush(stdout);
    // MPI's launcher ends the others once this one ends; they print first.
    std::this_thread::sleep_for(5s);
    return;
  }
  require(false, "the collective cannot end, and no error says so");
}

}  // namespace

void different() {
  const auto mpi = group_over("mpi", 60s);
  print_error(mpi, at::ones({mpi->getRank() == 0 ? 10 : 20000}));
  try {
    group_over("mpi", 60s);
  } catch (const c10::Error& error) {
    std::printf("again: %s\n", error.what_without_backtrace());
    return;
  }
  require(false, "there is a new group after a failure");
}

void splits() {
  const auto mpi = group_over("mpi", 60s);
  const int rank = mpi->getRank();
  // Rank 0 sends two to rank 1, which expects five; or the other way round.
  const auto exchange = [&](std::vector<int64_t> to_splits, std::vector<int64_t> from_splits) {
    auto to = at::zeros({to_splits[0] + to_splits[1]});
    ddp::all_to_all_single(
        to, at::ones({from_splits[0] + from_splits[1]}), to_splits, from_splits, mpi);
  };
  const auto begin = std::chrono::steady_clock::now();
  try {
    rank == 0 ? exchange({1, 3}, {1, 2}) : exchange({5, 1}, {3, 1});
  } catch (const c10::Error& error) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("rank %d after %.1f s: %s\n", rank, took.count(), error.what_without_backtrace());
  }
  if (rank == 0) std::this_thread::sleep_for(5s);  // its end is not to be the reason
  throw std::runtime_error("ended");
}

void stopped() {
  const auto mpi = group_over("mpi", 60s);
  if (mpi->getRank() == mpi->getSize() - 1) raise(SIGSTOP);
  require(mpi->getRank() == 0, "another rank ends by its own exception");
  group_over("mpi", 3s);
}

void late() {
  const auto mpi = group_over("mpi", 3s);
  if (mpi->getRank() == mpi->getSize() - 1) {
    std::this_thread::sleep_for(12s);
    return;
  }
  print_error(mpi, at::ones({4}));
}

void killed() {
  const auto mpi = group_over("mpi", 60s);
  ddp::barrier(mpi);
  if (mpi->getRank() == mpi->getSize() - 1) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    std::printf("killed at %.2f\n", now.count());
    raise(SIGKILL);
  }
  print_error(mpi, at::ones({1 << 20}));
}

}  // namespace mpi_world
