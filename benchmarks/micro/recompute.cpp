// Measures the time that activation checkpointing adds to a step: it computes forward twice. One
// process, one thread.
#include <vector>

#include <ddp/activation_checkpoint.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "in_turns.h"
#include "micro.h"

namespace {

using Blocks = std::vector<torch::nn::Sequential>;

Blocks make_blocks(int count) {
  Blocks blocks;
  for (int i = 0; i < count; ++i) {
    blocks.emplace_back(
        torch::nn::Linear(512, 2048), torch::nn::GELU(), torch::nn::Linear(2048, 512));
  }
  return blocks;
}

double block_step_ms(
    Blocks& blocks, torch::optim::SGD& optimizer, const at::Tensor& input, bool again) {
  return benchmarks::milliseconds([&] {
    optimizer.zero_grad();
    auto x = input;
    for (auto& block : blocks) x = again ? ddp::checkpoint(block, x) : block->forward(x);
    x.square().mean().backward();
    optimizer.step();
  });
}

void measure_recompute(int count, int rounds) {
  torch::manual_seed(0);
  auto blocks = make_blocks(count);
  std::vector<at::Tensor> parameters;
  for (auto& block : blocks) {
    for (auto& parameter : block->parameters()) parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, 1e-3);
  const auto input = torch::randn({64, 512});
  std::vector<benchmarks::Way> ways{
      {"all kept", [&] { return block_step_ms(blocks, optimizer, input, false); }},
      {"checkpointed", [&] { return block_step_ms(blocks, optimizer, input, true); }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  benchmarks::print_ways("blocks 512-2048-512, batch 64", "ms a step", ways);
}

}  // namespace

void benchmarks::add_recompute(CLI::App& app) {
  auto* command = app.add_subcommand(
      "recompute", "Steps of blocks 512-2048-512, batch 64, with activation checkpointing.");
  static int blocks = 24;
  static int rounds = 21;
  command->add_option("--blocks", blocks, "One after the other")->check(CLI::Range(1, 10000));
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->callback([] { measure_recompute(blocks, rounds); });
}
