// Measures what vote and replay_every cost a step: every second step compares replicas or replays a
// batch, and the others are plain. `ddprun -n 2 costs vote --width 1024 --rows 64`.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "benchmarks/costs/repetitions.h"
#include "benchmarks/median.h"

#include "costs.h"

namespace {

constexpr double kEvery = 50;

struct Shape {
  int64_t layers = 8;
  int64_t width = 512;
  int64_t rows = 64;
};

torch::nn::Sequential make_net(const Shape& shape) {
  torch::nn::Sequential net;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    net->push_back(torch::nn::Linear(shape.width, shape.width));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

void measure_option(
    const std::string& name, const ddp::DistributedDataParallelOptions& options, bool with_state,
    const Shape& shape, int rounds) {
  ddp::DistributedDataParallel model(make_net(shape), options);
  torch::optim::Adam optimizer(model->parameters());
  if (with_state) model->also_compare({&optimizer});
  const auto input = at::randn({shape.rows, shape.width});
  std::vector<double> plain, with;
  for (int step = 1; step <= 2 * rounds + 10; ++step) {
    const auto took = costs::microseconds_of([&] {
      optimizer.zero_grad();
      model->forward(input).square().mean().backward();
      optimizer.step();
    });
    if (step > 10) (step % 2 == 0 ? with : plain).push_back(took);
  }
  if (ddp::get_rank() != 0) return;
  const auto step_us = benchmarks::median(plain);
  const auto adds_us = benchmarks::median(with) - step_us;
  std::printf(
      "{\"what\": \"%s\", \"ranks\": %d, \"step_us\": %.1f, \"adds_us\": %.1f, "
      "\"percent_of_one_in_50\": %.3f}\n",
      name.c_str(), ddp::get_world_size(), step_us, adds_us, 100 * adds_us / step_us / kEvery);
}

void measure_all(const Shape& shape, int rounds) {
  using Options = ddp::DistributedDataParallelOptions;
  const auto votes = Options().vote(true).check_replicas_every(2).check_inputs(false);
  measure_option("vote", votes, /*with_state=*/false, shape, rounds);
  measure_option("vote, also_compare", votes, /*with_state=*/true, shape, rounds);
  const auto replays = Options().replay_every(2).check_inputs(false);
  measure_option("replay_every", replays, /*with_state=*/false, shape, rounds);
}

}  // namespace

void costs::add_vote(CLI::App& app) {
  auto* command = app.add_subcommand("vote", "What vote and replay_every add to a step.");
  static Shape shape;
  static int rounds = 100;
  for (const auto& [name, value] :
       {std::pair("--layers", &shape.layers), {"--width", &shape.width}, {"--rows", &shape.rows}}) {
    command->add_option(name, *value, "of the net")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
  }
  command->add_option("--rounds", rounds, "steps of each kind, in turns")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->callback([] {
    ddp::init_process_group();
    measure_all(shape, rounds);
    ddp::destroy_process_group();
  });
}
