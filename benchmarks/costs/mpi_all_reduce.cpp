// Times MPI_Allreduce as `costs all_reduce` times the library's: `mpirun -n 2
// mpi_all_reduce SECONDS BYTES...`. Built where CMake finds an MPI.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "repetitions.h"

namespace {

int fail(const char* why) {
  std::fprintf(stderr, "mpi_all_reduce: %s\n", why);
  return EXIT_FAILURE;
}

struct World {
  int rank = 0;
  int size = 0;
};

void sum_in_place(std::vector<float>& values) {
  MPI_Allreduce(
      MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
      MPI_COMM_WORLD);
}

bool sums_right(const World& world, std::vector<float>& values) {
  for (float& value : values) value = static_cast<float>(world.rank + 1);
  sum_in_place(values);
  const float expected = static_cast<float>(world.size * (world.size + 1)) / 2;
  return std::all_of(values.begin(), values.end(), [&](float v) { return v == expected; });
}

bool measure(const World& world, double seconds, int64_t bytes) {
  std::vector<float> values(static_cast<size_t>(bytes) / sizeof(float));
  if (!sums_right(world, values)) return false;
  std::fill(values.begin(), values.end(), 0.0F);  // sums of other values would grow
  const auto operation = [&] { sum_in_place(values); };
  operation();
  double us = costs::microseconds_of(operation);
  MPI_Bcast(&us, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  MPI_Barrier(MPI_COMM_WORLD);
  const auto times = costs::repeat(costs::repetitions_for(seconds, us), operation);
  if (world.rank == 0) costs::print_line("openmpi", world.size, bytes, times);
  MPI_Barrier(MPI_COMM_WORLD);
  return true;
}

int run(int argc, char** argv) {
  World world;
  MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world.size);
  char* end = nullptr;
  const double seconds = argc > 2 ? std::strtod(argv[1], &end) : 0;
  if (!(seconds > 0) || *end != 0) return fail("expected SECONDS > 0 and BYTES...");
  for (int i = 2; i < argc; ++i) {
    const int64_t bytes = std::strtoll(argv[i], &end, 10);
    if (*end != 0 || bytes < 4 || bytes > (int64_t{1} << 32)) {
      return fail("expected BYTES from 4 to 2^32");
    }
    if (!measure(world, seconds, bytes)) return fail("MPI_Allreduce summed up wrongly");
  }
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int status = run(argc, argv);
  // Aborts all ranks: the others would wait for a rank that failed alone.
  if (status != EXIT_SUCCESS) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return status;
}
