// One rank of a world that is made again and again: how long that takes. init_time.py starts all
// ranks and tells them when; Python's counterpart is peers/init_peer.py.
//
// For each line on standard input, a backend and a port, it makes the default group at that port of
// this host, passes a barrier, prints the seconds that both took, and destroys the group.
// RANK and WORLD_SIZE are in the environment.
#include <ddp/collectives.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

namespace {

double time_init(const std::string& backend, const std::string& port) {
  const auto start = std::chrono::steady_clock::now();
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .backend(backend == "default" ? "" : backend)
                              .init_method("tcp://127.0.0.1:" + port)
                              .timeout(std::chrono::minutes(5)));
  ddp::barrier();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  return time.count();
}

void say(const char* text) {
  std::puts(text);
  std::fflush(stdout);
}

}  // namespace

int main() try {
  say("ready");
  for (std::string backend, port; std::cin >> backend >> port;) {
    say(std::to_string(time_init(backend, port)).c_str());
    // Until the script has heard of all: rank 0's store goes with it.
    std::string all_done;
    std::cin >> all_done;
    ddp::destroy_process_group();
    say("ready");
  }
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "init_time: %s\n", error.what());
  return EXIT_FAILURE;
}
