// All-reduce over MPI beside Gloo and shared memory, in turns in one run:
//
//   mpirun -n 2 build/release/bin/mpi_bench
//
// Prints the median time of a call in microseconds, and how often as fast as Gloo it is.
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace {

using Clock = std::chrono::steady_clock;

const std::vector<std::string> kBackends{"mpi", "gloo", "shm"};
constexpr int kRounds = 15;

double microseconds_of(const ddp::ProcessGroup& group, at::Tensor& tensor, int calls) {
  ddp::barrier(group);
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) ddp::all_reduce(tensor, c10d::ReduceOp::MAX, group);
  const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
  return took.count() / calls;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main() {
  at::set_num_threads(1);
  std::map<std::string, ddp::ProcessGroup> groups;
  for (const auto& backend : kBackends) {
    groups[backend] =
        ddp::make_process_group(ddp::ProcessGroupOptions().backend(backend).init_method("mpi://"));
  }
  const bool prints = groups["mpi"]->getRank() == 0;
  if (prints) std::printf("%10s%12s%12s%12s%14s\n", "bytes", "mpi", "gloo", "shm", "gloo / mpi");
  for (const int64_t bytes : {1 << 10, 1 << 12, 1 << 16, 1 << 20, 25 << 20, 100 << 20}) {
    auto tensor = at::ones({bytes / 4});
    const int calls = bytes <= 1 << 16 ? 50 : bytes <= 1 << 20 ? 10 : 1;
    std::map<std::string, std::vector<double>> times;
    for (int round = 0; round <= kRounds; ++round) {
      for (const auto& backend : kBackends) {
        const auto time = microseconds_of(groups[backend], tensor, calls);
        if (round > 0) times[backend].push_back(time);  // the first round warms up
      }
    }
    if (!prints) continue;
    const auto mpi = median(times["mpi"]);
    const auto gloo = median(times["gloo"]);
    std::printf(
        "%10lld%12.0f%12.0f%12.0f%14.2f\n", static_cast<long long>(bytes), mpi, gloo,
        median(times["shm"]), gloo / mpi);
    std::fflush(stdout);
  }
  return 0;
}
