// Times the setup of a world, repeatedly: `costs init_time` is one rank. init_time.py starts all
// ranks and each run; Python's counterpart is peers/init_peer.py.
//
// For each line on standard input, a backend and a port, it makes the default group at that port of
// this host, passes a barrier, wraps a model and passes another barrier, prints the seconds until
// the first barrier and from there to the second, and destroys the group. RANK and WORLD_SIZE are
// in the environment.
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "costs.h"

namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

double time_init(const std::string& backend, const std::string& port) {
  const auto start = steady_clock::now();
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .backend(backend == "default" ? "" : backend)
                              .init_method("tcp://127.0.0.1:" + port)
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

/// Seconds to wrap the model: broadcasts rank 0's parameters, and compares the models of all ranks.
double time_wrap(const torch::nn::Sequential& net) {
  const auto start = steady_clock::now();
  const ddp::DistributedDataParallel<torch::nn::Sequential> model(net);
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
    const double init = time_init(backend, port);
    say((std::to_string(init) + " " + std::to_string(time_wrap(net))).c_str());
    // Waits until the script has every rank's times: rank 0's store ends with its group.
    std::string all_done;
    std::cin >> all_done;
    ddp::destroy_process_group();
    say("ready");
  }
}

}  // namespace

void costs::add_init_time(CLI::App& app) {
  app.add_subcommand(
         "init_time", "Making a group and wrapping a model, as init_time.py asks for it.")
      ->callback(serve_runs);
}
