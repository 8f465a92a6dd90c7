// What join() adds to a step when the inputs are even, beside what one tiny all-reduce takes.
//
//     ddprun -n 2 join_overhead
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/join.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <CLI/CLI.hpp>

#include "median.h"

namespace {

using Model = ddp::DistributedDataParallel<torch::nn::Sequential>;

torch::nn::Sequential make_net(int64_t width) {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

/// The time of each of `steps` repetitions.
double milliseconds_each(int steps, const std::function<void()>& step) {
  ddp::barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step();
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  return time.count() / steps;
}

struct Times {
  std::vector<double> plain, joined, all_reduce;
};

Times measure(int64_t width, int steps, int rounds) {
  auto net = make_net(width);
  Model model(net);
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  const auto input = torch::randn({32, width});
  const auto train = [&] {
    optimizer.zero_grad();
    model->forward(input).sum().backward();
    optimizer.step();
  };
  auto tiny = torch::zeros({2 * ddp::get_world_size()}, torch::kDouble);

  Times times;
  milliseconds_each(5, train);  // outlasts the rebuild
  for (int round = 0; round < rounds; ++round) {
    const auto plain = [&] { times.plain.push_back(milliseconds_each(steps, train)); };
    const auto joined = [&] {
      // Inside of it: at its end it broadcasts the model, once.
      model->join([&] { times.joined.push_back(milliseconds_each(steps, train)); });
    };
    // Every other round in the opposite order: a neighbour's warm cache helps both ways.
    round % 2 ? joined() : plain();
    round % 2 ? plain() : joined();
    times.all_reduce.push_back(milliseconds_each(steps, [&] { ddp::all_reduce(tiny); }));
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t width = 512;
  int steps = 30;
  int rounds = 11;
  CLI::App app("Time of a training step inside join() and outside, with even inputs.");
  app.add_option("--width", width, "Of the 4 linear layers")->check(CLI::Range(1L, 100000L));
  app.add_option("--steps", steps, "Steps in a row")->check(CLI::Range(1, 1000000));
  app.add_option("--rounds", rounds, "Turns of each")->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  ddp::init_process_group();
  const Times times = measure(width, steps, rounds);
  std::vector<double> added;
  for (int round = 0; round < rounds; ++round) {
    added.push_back(times.joined[round] - times.plain[round]);
  }
  if (ddp::get_rank() == 0) {
    std::printf("%-34s %10s\n", "4 x Linear, even inputs", "ms a step");
    std::printf("%-34s %10.3f\n", "outside of join", benchmarks::median(times.plain));
    std::printf("%-34s %10.3f\n", "inside", benchmarks::median(times.joined));
    std::printf("%-34s %10.3f\n", "added, round by round", benchmarks::median(added));
    std::printf(
        "%-34s %10.3f\n", "one all-reduce of its size", benchmarks::median(times.all_reduce));
  }
  ddp::destroy_process_group();
  return 0;
}
