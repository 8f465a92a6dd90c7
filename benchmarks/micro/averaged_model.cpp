// Measures what an update of an average of weights adds to a training step. One process.
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/averaged_model.h>
#include <ddp/optim.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "in_turns.h"
#include "micro.h"

namespace {

using torch::nn::Linear;

torch::nn::Sequential averaged_blocks(int count) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) {
    net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({512})));
    net->push_back(Linear(512, 2048));
    net->push_back(torch::nn::GELU());
    net->push_back(Linear(2048, 512));
  }
  return net;
}

void measure_averaged_model(int count, int tokens, int rounds) {
  torch::manual_seed(0);
  auto net = averaged_blocks(count);
  ddp::optim::AdamW optimizer(net->parameters(), 1e-4);
  const auto input = torch::randn({tokens, 512});
  ddp::AveragedModel ema(*net, ddp::AveragedModelOptions().ema(0.999));
  ddp::AveragedModel swa(*net);
  const auto step = [&] {
    optimizer.zero_grad();
    net->forward(input).square().mean().backward();
    optimizer.step();
  };
  std::vector<benchmarks::Way> ways{
      {"the step alone", [&] { return benchmarks::milliseconds(step); }},
      {"update(), ema", [&] { return benchmarks::milliseconds([&] { ema.update(); }); }},
      {"update(), swa", [&] { return benchmarks::milliseconds([&] { swa.update(); }); }},
      {"apply() and back",
       [&] { return benchmarks::milliseconds([&] { const auto guard = ema.apply(); }); }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/2, rounds);
  benchmarks::print_ways("blocks 512-2048-512, AdamW", "ms", ways);
}

}  // namespace

void benchmarks::add_averaged_model(CLI::App& app) {
  auto* command = app.add_subcommand(
      "averaged_model",
      "Updates of an average of weights, beside the step of a transformer's MLPs.");
  static int blocks = 8;
  static int tokens = 1024;
  static int rounds = 11;
  static int threads = 1;
  command->add_option("--blocks", blocks, "MLPs")->check(CLI::Range(1, 1000));
  command->add_option("--tokens", tokens, "Of a batch")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Of each, in turns")->check(CLI::Range(1, 1000000));
  command->add_option("--threads", threads, "Of a step")->check(CLI::Range(1, 1000));
  command->callback([] {
    at::set_num_threads(threads);
    measure_averaged_model(blocks, tokens, rounds);
  });
}
