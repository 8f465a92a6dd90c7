// One rank, RANK of 4, of a mesh {2, 2} of "dp" and "tp" in which a rank fails.
//
// mesh_world WHAT AXIS VICTIM BACKEND SECONDS
//   VICTIM and its neighbor on AXIS reduce over that axis again and again. The other two wait for
//   them on the other axis. In the middle, VICTIM does WHAT: kill or stop itself, or throw.
//   SECONDS  the groups' timeout
//
// The others print the resulting error, and after how many milliseconds it was thrown.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/internal/check.h>

namespace comm_mesh_world {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

constexpr auto kBeforeFault = 500ms;

void reduce_over(const ddp::ProcessGroup& group, int64_t elements) {
  auto sum = at::ones({elements});
  ddp::all_reduce(sum, c10d::ReduceOp::SUM, group);
}

/// Sends this process a signal in the middle of a collective.
void signal_later(const std::string& what) {
  std::thread([signal = what == "kill" ? SIGKILL : SIGSTOP] {
    std::this_thread::sleep_for(kBeforeFault);
    std::raise(signal);
  }).detach();
}

void run(const std::string& what, const std::string& axis, int victim) {
  const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"});
  const std::string other = axis == "tp" ? "dp" : "tp";
  const bool is_victim = ddp::get_rank() == victim;
  const bool reduces = mesh.rank(other) == (other == "dp" ? victim / 2 : victim % 2);
  ddp::barrier();
  if (is_victim && what != "throw") signal_later(what);
  const auto start = Clock::now();
  if (!reduces) reduce_over(mesh.group(other), 1);
  while (true) {
    reduce_over(mesh.group(axis), 1 << 20);
    if (is_victim && what == "throw" && Clock::now() - start > kBeforeFault) {
      throw std::runtime_error("user boom");
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 6, "expected what to do, an axis, a rank, a backend and seconds");
  const int victim = std::atoi(argv[3]);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(argv[4]).timeout(
      std::chrono::seconds(std::atoi(argv[5]))));
  if (ddp::get_rank() == victim) {
    run(argv[1], argv[2], victim);
  } else {
    const auto start = Clock::now();
    const auto text = ddp::problem_of([&] { run(argv[1], argv[2], victim); });
    const std::chrono::duration<double, std::milli> waited = Clock::now() - start;
    std::printf("learned after %.0f ms: %s\n", waited.count(), text.c_str());
    std::fflush(stdout);
  }
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "mesh_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace comm_mesh_world
