// What dividing the optimizer's state among the ranks gains, or costs, a step: the wrapper with a
// whole AdamW beside ZeroRedundancyOptimizer.
//
//     ddprun -n 2 sharded_step
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>
#include <CLI/CLI.hpp>

#include "linear_layers.h"
#include "median.h"

namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;

/// A model and an optimizer of its own.
struct Way {
  std::string name;
  ddp::DistributedDataParallel<torch::nn::Sequential> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> times = {}, ratios = {};
};

Way make_way(const std::string& name, int64_t layers, int64_t width, const ddp::ZeroOptions* zero) {
  Way way{
      name,
      ddp::DistributedDataParallel<torch::nn::Sequential>(
          benchmarks::make_linear_layers(layers, width),
          ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true)),
      nullptr};
  const AdamWOptions options(1e-4);
  if (zero) {
    way.optimizer =
        std::make_unique<ddp::ZeroRedundancyOptimizer<AdamW>>(way.model, options, *zero);
  } else {
    way.optimizer = std::make_unique<AdamW>(way.model->parameters(), options);
  }
  return way;
}

double step_ms(Way& way, const at::Tensor& input) {
  ddp::barrier();
  const auto start = std::chrono::steady_clock::now();
  way.optimizer->zero_grad();
  way.model->forward(input).square().mean().backward();
  way.optimizer->step();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

void measure(int64_t layers, int64_t width, int64_t batch, int rounds) {
  using ddp::ZeroOptions;
  const ZeroOptions first = ZeroOptions().stage(1);
  const ZeroOptions second = ZeroOptions().stage(2);
  const ZeroOptions first_in_backward = ZeroOptions().stage(1).overlap(true);
  const ZeroOptions second_in_backward = ZeroOptions().stage(2).overlap(true);
  std::vector<Way> ways;
  ways.push_back(make_way("wrapper, whole AdamW", layers, width, nullptr));
  ways.push_back(make_way("stage 1", layers, width, &first));
  ways.push_back(make_way("stage 1, overlap", layers, width, &first_in_backward));
  ways.push_back(make_way("stage 2", layers, width, &second));
  ways.push_back(make_way("stage 2, overlap", layers, width, &second_in_backward));
  const auto input = torch::randn({batch, width});
  for (int round = -2; round < rounds; ++round) {
    // In turns, each second round in the opposite order: a drift meets all alike.
    std::vector<double> now(ways.size());
    for (size_t i = 0; i < ways.size(); ++i) {
      const auto which = round % 2 == 0 ? i : ways.size() - 1 - i;
      now[which] = step_ms(ways[which], input);
    }
    if (round < 0) continue;  // makes the states
    for (size_t i = 0; i < ways.size(); ++i) {
      ways[i].times.push_back(now[i]);
      ways[i].ratios.push_back(now[i] / now[0]);
    }
  }
  if (ddp::get_rank() != 0) return;
  std::printf(
      "%-24s %10s %10s   %.1f million parameters, %d ranks\n", "", "ms a step", "ratio",
      static_cast<double>(layers * width * (width + 1)) / 1e6, ddp::get_world_size());
  for (const auto& way : ways) {
    std::printf(
        "%-24s %10.2f %10.3f\n", way.name.c_str(), benchmarks::median(way.times),
        benchmarks::median(way.ratios));
  }
}

}  // namespace

int main(int argc, char** argv) {
  int64_t layers = 20;
  int64_t width = 1000;
  int64_t batch = 8;
  int rounds = 21;
  CLI::App app("Steps with a sharded AdamW, beside steps with a whole one.");
  app.add_option("--layers", layers, "Of the model")->check(CLI::Range(1, 10000));
  app.add_option("--width", width, "Of each layer")->check(CLI::Range(1, 100000));
  app.add_option("--batch", batch, "Samples a step and rank")->check(CLI::Range(1, 100000));
  app.add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  ddp::init_process_group();
  measure(layers, width, batch, rounds);
  ddp::destroy_process_group();
  return 0;
}
