// What activation checkpointing adds to a step, which computes forward twice. One process, one
// thread.
//
//     recompute_overhead
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/activation_checkpoint.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <CLI/CLI.hpp>

#include "median.h"

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

double step_ms(Blocks& blocks, torch::optim::SGD& optimizer, const at::Tensor& input, bool again) {
  const auto start = std::chrono::steady_clock::now();
  optimizer.zero_grad();
  auto x = input;
  for (auto& block : blocks) x = again ? ddp::checkpoint(block, x) : block->forward(x);
  x.square().mean().backward();
  optimizer.step();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

}  // namespace

int main(int argc, char** argv) {
  int blocks = 24;
  int rounds = 21;
  CLI::App app(
      "Steps of blocks 512-2048-512, batch 64, with activation checkpointing and without.");
  app.add_option("--blocks", blocks, "One after the other")->check(CLI::Range(1, 10000));
  app.add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  torch::manual_seed(0);
  auto net = make_blocks(blocks);
  std::vector<at::Tensor> parameters;
  for (auto& block : net) {
    for (auto& parameter : block->parameters()) parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, 1e-3);
  const auto input = torch::randn({64, 512});
  std::vector<double> times[2];
  std::vector<double> ratios;
  for (int round = -1; round < rounds; ++round) {
    double now[2];
    for (int i = 0; i < 2; ++i) {
      const int which = round % 2 == 0 ? i : 1 - i;
      now[which] = step_ms(net, optimizer, input, which == 1);
    }
    if (round < 0) continue;  // warms up
    for (int i = 0; i < 2; ++i) times[i].push_back(now[i]);
    ratios.push_back(now[1] / now[0]);
  }
  std::printf("%-24s %10s %10s\n", "", "ms a step", "ratio");
  std::printf("%-24s %10.2f\n", "all kept", benchmarks::median(times[0]));
  std::printf(
      "%-24s %10.2f %10.3f\n", "checkpointed", benchmarks::median(times[1]),
      benchmarks::median(ratios));
  return 0;
}
