// One rank, RANK of WORLD_SIZE, of a world in which one rank fails: a process, which others can
// watch, and which can end or stop.
//
// failing_world kill VICTIM FILE [HOSTS]
//   connects through FILE, over shared memory; then VICTIM kills itself, and the others print the
//   resulting error, and after how many milliseconds it was thrown
// failing_world exchange VICTIM FILE
//   the same in an all-to-all of many rounds, of which VICTIM has finished the first ones
// failing_world stop VICTIM FILE HOSTS
//   VICTIM stops itself in the middle of an all-reduce that the last rank does not call; the others
//   print as above
// failing_world pause VICTIM FILE
//   VICTIM stops itself once it has called an all-reduce, which the others call after that
// failing_world wait VICTIM FILE
//   no rank fails: the ranks print which memory they share, and wait
//
// HOSTS has a letter for each rank: ranks with the same letter share memory, as on one host.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "support/hosts.h"
#include "worlds/stopped.h"

namespace comm_failing_world {

using namespace std::chrono_literals;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

namespace {

int number_of(const char* variable) { return std::atoi(std::getenv(variable)); }

// Makes the backend as the library does on one host.
BackendPtr on_this_host(const std::string& file, std::chrono::milliseconds timeout) {
  const auto group = ddp::init_process_group(
      ddp::ProcessGroupOptions().backend("shm").init_method("file://" + file).timeout(timeout));
  return group->getBackend(at::kCPU);
}

BackendPtr on_hosts(const std::string& file, const std::string& hosts) {
  const auto store = c10::make_intrusive<c10d::FileStore>(file, number_of("WORLD_SIZE"));
  const auto shared = ddp::testing::share_on_hosts(store, number_of("RANK"), hosts, 3s, 20s);
  TORCH_CHECK(shared.backend, shared.why_not);
  return shared.backend;
}

c10::intrusive_ptr<c10d::Work> start_sum(const BackendPtr& backend) {
  std::vector<at::Tensor> tensors{at::ones({1})};
  return backend->allreduce(tensors, {});
}

// 64 MiB from each rank to each rank.
c10::intrusive_ptr<c10d::Work> start_exchange(const BackendPtr& backend, at::Tensor& to) {
  auto from = at::ones({number_of("WORLD_SIZE") * 16, 1 << 20});
  std::vector<int64_t> equal;
  return backend->DDP_ALL_TO_ALL_SINGLE(to, from, equal, equal);
}

// Each rank's process.
std::vector<pid_t> processes(const BackendPtr& backend) {
  auto pids = at::zeros({number_of("WORLD_SIZE")}, at::kDouble);
  pids[number_of("RANK")] = static_cast<double>(getpid());
  std::vector<at::Tensor> tensors{pids};
  backend->allreduce(tensors, {})->wait();
  return {pids.data_ptr<double>(), pids.data_ptr<double>() + pids.numel()};
}

int print_failure_of(c10::function_ref<c10::intrusive_ptr<c10d::Work>()> begin) {
  const auto start = std::chrono::steady_clock::now();
  const auto text = ddp::problem_of([&] { begin()->wait(); });
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  if (text.empty()) return EXIT_FAILURE;
  std::printf("after %.0f ms: %s\n", time.count(), text.c_str());
  return EXIT_SUCCESS;
}

void print_shared_memory() {
  const auto maps = "/proc/" + std::to_string(getpid()) + "/maps";
  std::FILE* file = std::fopen(maps.c_str(), "r");
  char line[512];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::string(line).find(" rw-s ") != std::string::npos) std::printf("shares %s", line);
  }
  std::fclose(file);
  std::printf("waiting\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 4 || argc == 5, "expected what to do, a rank, a file and maybe hosts");
  const std::string what = argv[1];
  const int rank = number_of("RANK");
  const bool is_victim = rank == std::atoi(argv[2]);
  const auto timeout = what == "pause" ? 8s : 20s;
  const std::string hosts = argc == 4 ? "" : argv[4];
  const auto backend = hosts.empty() ? on_this_host(argv[3], timeout) : on_hosts(argv[3], hosts);
  start_sum(backend)->wait();
  if (what == "wait") {
    print_shared_memory();
    std::this_thread::sleep_for(60s);
  }
  if (what == "exchange") {
    auto to = at::zeros({number_of("WORLD_SIZE") * 16, 1 << 20});
    const auto exchange = start_exchange(backend, to);
    if (is_victim) {
      const volatile float& first = *to.data_ptr<float>();
      while (first == 0) std::this_thread::yield();
      std::raise(SIGKILL);
    }
    return print_failure_of([&] { return exchange; });
  }
  if (what == "kill" && is_victim) std::raise(SIGKILL);
  if (what == "stop" && is_victim) {
    const auto sum = start_sum(backend);
    std::this_thread::sleep_for(1s);  // until its host has gathered
    std::raise(SIGSTOP);
  }
  if (what == "stop" && rank == number_of("WORLD_SIZE") - 1) std::this_thread::sleep_for(60s);
  if (what == "pause") {
    const auto pids = processes(backend);
    if (is_victim) {
      const auto sum = start_sum(backend);
      std::raise(SIGSTOP);
    }
    const auto victim = pids[static_cast<size_t>(std::atoi(argv[2]))];
    while (!ddp::testing::is_stopped(victim)) std::this_thread::sleep_for(1ms);
  }
  return print_failure_of([&] { return start_sum(backend); });
} catch (const std::exception& error) {
  std::fprintf(stderr, "failing_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace comm_failing_world
