// Measures how dividing the optimizer's state among the ranks changes the time of a step: compares
// the wrapper with a whole AdamW with ZeroRedundancyOptimizer.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;

/// Steps a model with an optimizer of its own.
benchmarks::Way make_sharded_way(
    const std::string& name, int64_t layers, int64_t width, const at::Tensor& input,
    const ddp::ZeroOptions* zero) {
  ddp::DistributedDataParallel model(
      benchmarks::make_linear_layers(layers, width),
      ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
  const AdamWOptions options(1e-4);
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  if (zero) {
    optimizer = std::make_shared<ddp::ZeroRedundancyOptimizer<AdamW>>(model, options, *zero);
  } else {
    optimizer = std::make_shared<AdamW>(model->parameters(), options);
  }
  return {name, [model, optimizer, input]() mutable {
            ddp::barrier();
            return benchmarks::milliseconds([&] {
              optimizer->zero_grad();
              model->forward(input).square().mean().backward();
              optimizer->step();
            });
          }};
}

void measure_zero(int64_t layers, int64_t width, int64_t batch, int rounds) {
  using ddp::ZeroOptions;
  const std::vector<std::pair<std::string, ZeroOptions>> sharded = {
      {"stage 1", ZeroOptions().stage(1)},
      {"stage 1, overlap", ZeroOptions().stage(1).overlap(true)},
      {"stage 2", ZeroOptions().stage(2)},
      {"stage 2, overlap", ZeroOptions().stage(2).overlap(true)}};
  const auto input = torch::randn({batch, width});
  std::vector<benchmarks::Way> ways{
      make_sharded_way("wrapper, whole AdamW", layers, width, input, nullptr)};
  for (const auto& [name, zero] : sharded) {
    ways.push_back(make_sharded_way(name, layers, width, input, &zero));
  }
  benchmarks::run_in_turns(ways, /*warm_up=*/2, rounds);  // the first rounds make the states
  if (ddp::get_rank() != 0) return;
  benchmarks::print_linear_layers(layers, width);
  benchmarks::print_ways("", "ms a step", ways);
}

}  // namespace

void benchmarks::add_zero(CLI::App& app) {
  auto* command =
      app.add_subcommand("zero", "Steps with a sharded AdamW, beside steps with a whole one.");
  static int64_t layers = 20;
  static int64_t width = 1000;
  static int64_t batch = 8;
  static int rounds = 21;
  benchmarks::add_options_of_linear_layers(*command, layers, width);
  command->add_option("--batch", batch, "Samples a step and rank")->check(CLI::Range(1, 100000));
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->callback([] {
    ddp::init_process_group();
    measure_zero(layers, width, batch, rounds);
    ddp::destroy_process_group();
  });
}
