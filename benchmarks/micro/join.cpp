// Measures the time that join() adds to a step when the inputs are even, beside the time of one
// tiny all-reduce.
#include <cstdio>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/join.h>
#include <ddp/process_group.h>
#include <torch/optim/sgd.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

void measure_join(int64_t width, int steps, int rounds) {
  ddp::DistributedDataParallel model(benchmarks::make_linear_layers(4, width));
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  const auto input = torch::randn({32, width});
  const auto train = [&] {
    optimizer.zero_grad();
    model->forward(input).sum().backward();
    optimizer.step();
  };
  auto tiny = torch::zeros({2 * ddp::get_world_size()}, torch::kDouble);
  const auto each = [steps](const auto& step) {
    ddp::barrier();
    return benchmarks::milliseconds([&] {
             for (int i = 0; i < steps; ++i) step();
           }) /
           steps;
  };

  std::vector<benchmarks::Way> ways{
      {"outside of join", [&] { return each(train); }},
      {"inside",
       [&] {
         double took = 0;  // without the join's end, which broadcasts the model once
         model->join([&] { took = each(train); });
         return took;
       }},
      {"one all-reduce of its size", [&] { return each([&] { ddp::all_reduce(tiny); }); }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  if (ddp::get_rank() != 0) return;
  benchmarks::print_ways("4 x Linear, even inputs", "ms a step", ways);
  std::vector<double> added;
  for (size_t round = 0; round < ways[0].times.size(); ++round) {
    added.push_back(ways[1].times[round] - ways[0].times[round]);
  }
  std::printf("%-34s %12.3f\n", "added, round by round", benchmarks::median(added));
}

}  // namespace

void benchmarks::add_join(CLI::App& app) {
  auto* command = app.add_subcommand(
      "join", "Time of a training step inside join() and outside, with even inputs.");
  static int64_t width = 512;
  static int steps = 30;
  static int rounds = 11;
  command->add_option("--width", width, "Of the 4 linear layers")->check(CLI::Range(1L, 100000L));
  command->add_option("--steps", steps, "Steps in a row")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Turns of each")->check(CLI::Range(1, 1000000));
  command->callback([] {
    ddp::init_process_group();
    measure_join(width, steps, rounds);
    ddp::destroy_process_group();
  });
}
