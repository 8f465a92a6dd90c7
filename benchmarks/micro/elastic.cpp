// What Elastic adds to a healthy training step: the boundary between two turns, and step().
#include <cstdint>
#include <cstdio>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

void measure_elastic(int64_t width, int steps, int rounds) {
  ddp::Elastic run(ddp::ElasticOptions().seed(1));
  ddp::DistributedDataParallel model(benchmarks::make_linear_layers(4, width));
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  ddp::DistributedSampler sampler(1 << 20);
  ddp::GradScaler scaler;
  double loss = 0;
  run.add("model", model).add("optimizer", optimizer).add("sampler", sampler);
  run.add("scaler", scaler).add("loss", loss);
  run.enter();
  const auto input = torch::randn({32, width});
  const auto backward = [&] {
    optimizer.zero_grad();
    model->forward(input).sum().backward();
  };
  const auto each = [&](int count, const auto& step) {
    ddp::barrier();
    return benchmarks::milliseconds([&] {
             for (int i = 0; i < count; ++i) step();
           }) /
           count;
  };
  const auto plain = [&] {
    return each(steps, [&] {
      backward();
      optimizer.step();
    });
  };
  // The second of the same shows what the machine makes of nothing.
  std::vector<benchmarks::Way> ways{
      {"a step", plain},
      {"in a turn",
       [&] {
         return each(steps, [&] {
           run.begin_turn();
           backward();
           run.step(optimizer);
         });
       }},
      {"a step once more", plain},
      {"an empty turn", [&] {
         return each(1000, [&] {
           run.begin_turn();
           run.step([] {});
         });
       }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/2, rounds);
  if (run.generation().rank == 0) {
    benchmarks::print_ways("4 x Linear, 5 parts", "ms a step", ways);
  }
  run.finish();
}

}  // namespace

void benchmarks::add_elastic(CLI::App& app) {
  auto* command =
      app.add_subcommand("elastic", "Time of a training step in a turn of Elastic, and without.");
  static int64_t width = 512;
  static int steps = 5;
  static int rounds = 200;
  command->add_option("--width", width, "Of the 4 linear layers")->check(CLI::Range(1L, 100000L));
  command->add_option("--steps", steps, "Steps in a row")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Turns of each")->check(CLI::Range(1, 1000000));
  command->callback([] { measure_elastic(width, steps, rounds); });
}
