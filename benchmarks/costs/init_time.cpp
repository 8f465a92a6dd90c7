// Times the setup of a world, repeatedly: `costs init_time` is one rank. init_time.py starts all
// ranks and each run; Python's counterpart is peers/init_peer.py.
//
// For each line on standard input, a backend and a port, it makes the default group at that port of
// this host, passes a barrier, wraps a model and passes another barrier, prints the seconds until
// the first barrier and from there to the second, and destroys the group. RANK and WORLD_SIZE are
// in the environment.
//
// `costs init_time --spawn 256` starts all ranks itself, as copies of a process that has loaded
// LibTorch: so many that each with a LibTorch of its own have no room on a host.
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/spawn.h>
#include <sys/mman.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "benchmarks/median.h"
#include "costs.h"

namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

double time_init(const std::string& backend, const std::string& init_method) {
  const auto start = steady_clock::now();
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .backend(backend == "default" ? "" : backend)
                              .init_method(init_method)
                              .timeout(std::chrono::minutes(5)));
  ddp::barrier();
  return seconds_since(start);
}

/// 8 parameters, 1 MiB; the same as in peers/init_peer.py.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(256, 256));
  return net;
}

using WrappedNet = ddp::DistributedDataParallel<torch::nn::Sequential>;

/// Seconds to wrap the model: broadcasts rank 0's parameters, and compares the models of all ranks.
double time_wrap(const torch::nn::Sequential& net) {
  const auto start = steady_clock::now();
  const WrappedNet model(net);
  ddp::barrier();
  return seconds_since(start);
}

void say(const char* text) {
  std::puts(text);
  std::fflush(stdout);
}

void serve_runs() {
  say("ready");
  for (std::string backend, port; std::cin >> backend >> port;) {
    const auto net = make_net();
    const double init = time_init(backend, "tcp://127.0.0.1:" + port);
    say((std::to_string(init) + " " + std::to_string(time_wrap(net))).c_str());
    // Waits until the script has every rank's times: rank 0's store ends with its group.
    std::string all_done;
    std::cin >> all_done;
    ddp::destroy_process_group();
    say("ready");
  }
}

/// The number after `name` in a file of lines such as "VmPTE:    1384 kB".
int64_t number_in(const char* file, const std::string& name) {
  std::ifstream lines(file);
  int64_t number = 0;
  for (std::string word; lines >> word;) {
    if (word == name + ":" && lines >> number) break;
  }
  return number;
}

/// The measurements of a rank of spawn().
struct SetupCost {
  double init = 0;
  double wrap = 0;
  double step = 0;
  int64_t own_kb = 0;   // memory that only this process has, with its page tables
  int64_t host_kb = 0;  // that the host has left; rank 0's
};

/// Memory of all ranks, which are copies of one process.
struct RanksMemory {
  static constexpr size_t kMostRanks = 1024;

  std::atomic<int> arrived{0};
  std::array<SetupCost, kMostRanks> ranks;

  /// Waits until all have come, for the `time`th time. Starts the clocks of all, without a group.
  void meet(int count, int time) {
    for (++arrived; arrived < count * time;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

RanksMemory& make_ranks_memory() {
  void* memory = ::mmap(
      nullptr, sizeof(RanksMemory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  return *new (memory) RanksMemory;
}

SetupCost measure_rank(RanksMemory& shared, int count, const std::string& backend) {
  const auto net = make_net();
  SetupCost own;
  shared.meet(count, 1);
  own.init = time_init(backend, "env://");
  const auto wrapping = steady_clock::now();
  WrappedNet model(net);
  ddp::barrier();
  own.wrap = seconds_since(wrapping);
  const auto stepping = steady_clock::now();
  model->forward(torch::ones({1, 256})).sum().backward();
  ddp::barrier();
  own.step = seconds_since(stepping);
  own.own_kb = number_in("/proc/self/smaps_rollup", "Private_Dirty") +
               number_in("/proc/self/status", "VmPTE");
  own.host_kb = number_in("/proc/meminfo", "MemAvailable");
  shared.meet(count, 2);  // rank 0's store ends with its group
  return own;
}

/// Prints a line of JSON: of each run's slowest rank, the median of all runs.
void measure_spawned(int count, const std::string& backend, int runs) {
  std::vector<double> init, wrap, step, own_mb, host_mb;
  for (int run = 0; run < runs; ++run) {
    auto& shared = make_ranks_memory();
    const auto before = number_in("/proc/meminfo", "MemAvailable");
    ddp::spawn(count, [&](int rank) {
      shared.ranks[static_cast<size_t>(rank)] = measure_rank(shared, count, backend);
    });
    const auto most = [&](auto part) {
      const auto less = [&](const SetupCost& a, const SetupCost& b) { return a.*part < b.*part; };
      return (*std::max_element(shared.ranks.begin(), shared.ranks.end(), less)).*part;
    };
    init.push_back(most(&SetupCost::init));
    wrap.push_back(most(&SetupCost::wrap));
    step.push_back(most(&SetupCost::step));
    own_mb.push_back(static_cast<double>(most(&SetupCost::own_kb)) / 1024);
    host_mb.push_back(static_cast<double>(before - shared.ranks[0].host_kb) / 1024 / count);
    ::munmap(&shared, sizeof(RanksMemory));
  }
  std::printf(
      "{\"kind\": \"spawned, %s\", \"ranks\": %d, \"init_s\": %.6f, \"wrap_s\": %.6f, "
      "\"step_s\": %.6f, \"own_mb\": %.2f, \"host_mb\": %.2f}\n",
      backend.c_str(), count, benchmarks::median(init), benchmarks::median(wrap),
      benchmarks::median(step), benchmarks::median(own_mb), benchmarks::median(host_mb));
  std::fflush(stdout);
}

}  // namespace

void costs::add_init_time(CLI::App& app) {
  auto* time = app.add_subcommand(
      "init_time", "Making a group and wrapping a model, as init_time.py asks for it.");
  static int spawn = 0;
  static int runs = 3;
  static std::string backend = "default";
  time->add_option("--spawn", spawn, "so many ranks, all started here, instead of standard input")
      ->check(CLI::Range(2, static_cast<int>(RanksMemory::kMostRanks)));
  time->add_option("--runs", runs, "of --spawn")->check(CLI::PositiveNumber);
  time->add_option("--backend", backend, "of --spawn");
  time->callback([] { spawn > 0 ? measure_spawned(spawn, backend, runs) : serve_runs(); });
}
