// One rank, RANK of WORLD_SIZE, at MASTER_PORT, of a world whose rank 0, which hosts the store,
// stops itself; the others print the resulting error, and after how many milliseconds it was
// thrown.
//
// frozen_world before       rank 0 stops before any other rank has connected
// frozen_world init         ... in the middle of init_process_group
// frozen_world new_group    ... before the others call new_group
// frozen_world barrier      ... before the others call monitored_barrier
// frozen_world destroy      ... before the others call destroy_process_group
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "worlds/stopped.h"

namespace comm_frozen_world {

using namespace std::chrono_literals;

namespace {

constexpr auto kTimeout = 8s;  // also of the start of all ranks

int rank() { return std::atoi(std::getenv("RANK")); }

c10::intrusive_ptr<c10d::Store> store_at(const char* port, bool is_server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::atoi(port));
  options.isServer = is_server;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

ddp::ProcessGroup init(const char* port, std::chrono::milliseconds timeout = kTimeout) {
  return ddp::init_process_group(ddp::ProcessGroupOptions()
                                     .init_method(std::string("tcp://127.0.0.1:") + port)
                                     .timeout(timeout));
}

[[noreturn]] void stop() {
  std::raise(SIGSTOP);
  std::_Exit(EXIT_SUCCESS);
}

// Stops this process once rank 1 has entered the startup barrier, which rank 2 never does.
void stop_in_startup_barrier(const char* port) {
  std::thread([port] {
    while (ddp::problem_of([&] { store_at(port, false); }) != "") std::this_thread::yield();
    const auto store = store_at(port, false);
    const auto round = "ddp/init/" + store->get_to_str("ddp/init/open");
    store->wait({round + "/here/1"}, 60s);
    stop();
  }).detach();
}

// Rank 0 stops; the others return after that.
void stop_rank_0() {
  auto pid = at::full({1}, static_cast<double>(getpid()));
  ddp::broadcast(pid, 0);
  if (rank() == 0) stop();
  while (!ddp::testing::is_stopped(static_cast<pid_t>(pid.item<double>()))) {
    std::this_thread::yield();
  }
}

void print_failure(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  const auto text = ddp::problem_of(body);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  std::printf("after %.0f ms: %s\n", time.count(), text.empty() ? "no error" : text.c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 2, "expected what to do");
  const std::string what = argv[1];
  const auto* port = std::getenv("MASTER_PORT");
  if (what == "before") {
    if (rank() != 0) {
      print_failure([&] { init(port); });
      return EXIT_SUCCESS;
    }
    [[maybe_unused]] const auto store = store_at(port, true);
    std::printf("stops\n");
    std::fflush(stdout);
    stop();
  }
  if (what == "init") {
    if (rank() == 0) {
      stop_in_startup_barrier(port);
      init(port, 60s);
    }
    print_failure([&] { init(port); });
    return EXIT_SUCCESS;
  }
  init(port);
  stop_rank_0();
  if (what == "new_group") print_failure([] { ddp::new_group({1, 2}); });
  if (what == "barrier") print_failure([] { ddp::monitored_barrier(kTimeout); });
  if (what == "destroy") print_failure([] { ddp::destroy_process_group(); });
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "frozen_world: %s\n", ddp::text_of(error).c_str());
  return EXIT_FAILURE;
}

}  // namespace comm_frozen_world
