// Measures the cost of a Profiler for a training step, outside of its active steps and within. One
// process, one thread.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/profiler.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>

#include "in_turns.h"
#include "linear_layers.h"
#include "micro.h"

namespace {

constexpr int64_t kNever = 1'000'000'000;  // steps

struct Training {
  torch::nn::Sequential net;
  torch::optim::SGD optimizer;
  at::Tensor input;

  Training(int64_t layers, int64_t width, int64_t batch)
      : net(benchmarks::make_linear_layers(layers, width)),
        optimizer(net->parameters(), 1e-3),
        input(torch::randn({batch, width})) {}

  void step() {
    optimizer.zero_grad();
    net->forward(input).square().mean().backward();
    optimizer.step();
  }
};

/// Milliseconds a step, over a block of steps that does not change the state of `profiler`, which
/// may be empty.
double block_ms(Training& training, int steps, ddp::Profiler* profiler) {
  training.step();
  return benchmarks::milliseconds([&] {
           for (int i = 0; i < steps; ++i) {
             training.step();
             if (profiler) profiler->step();
           }
         }) /
         steps;
}

benchmarks::Way with_profiler(
    const std::string& name, Training& training, int steps, const ddp::ProfilerOptions& options,
    int64_t steps_before) {
  return {name, [&training, steps, options, steps_before] {
            ddp::Profiler profiler(options);
            for (int64_t i = 0; i < steps_before; ++i) profiler.step();
            return block_ms(training, steps, &profiler);
          }};
}

/// The mean time of `call`, for calls that take only nanoseconds.
template <typename Call>
void print_nanoseconds(const char* name, const Call& call) {
  constexpr int kCalls = 1'000'000;
  const auto took = benchmarks::milliseconds([&] {
    for (int i = 0; i < kCalls; ++i) call();
  });
  std::printf("%-34s %12.1f ns a call\n", name, 1e6 * took / kCalls);
}

void measure_profiler(Training training, int steps, int rounds) {
  using ddp::ProfilerOptions;
  const auto one_cycle = ProfilerOptions().active(1).repeat(1);
  const auto none = [&] { return block_ms(training, steps, nullptr); };
  std::vector<benchmarks::Way> ways{
      {"no profiler", none},
      with_profiler("waiting", training, steps, ProfilerOptions().wait(kNever), 0),
      with_profiler("warming up", training, steps, ProfilerOptions().warmup(kNever), 0),
      with_profiler("after its last cycle", training, steps, one_cycle, 2),
      with_profiler("recording", training, steps, ProfilerOptions().active(kNever), 0),
      with_profiler(
          "recording with stacks", training, steps,
          ProfilerOptions().active(kNever).with_stack(true), 0),
      {"no profiler, again", none}};  // its ratio is the noise
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  benchmarks::print_ways("", "ms a step", ways);
  ddp::Profiler waits(ProfilerOptions().wait(kNever));
  print_nanoseconds("step() that waits", [&] { waits.step(); });
  print_nanoseconds("range, not recorded", [] { const ddp::RecordFunctionGuard range("range"); });
}

}  // namespace

void benchmarks::add_profiler(CLI::App& app) {
  auto* command = app.add_subcommand(
      "profiler", "Steps of linear layers with a Profiler in each state, beside steps without.");
  static int64_t layers = 4;
  static int64_t width = 128;
  static int64_t batch = 32;
  static int steps = 20;
  static int rounds = 31;
  command->add_option("--layers", layers, "One after the other")->check(CLI::Range(1, 10000));
  command->add_option("--width", width, "Of each layer")->check(CLI::Range(1, 100000));
  command->add_option("--batch", batch, "Rows of the input")->check(CLI::Range(1, 100000));
  command->add_option("--steps", steps, "In a block")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Blocks of each, in turns")
      ->check(CLI::Range(1, 1000000));
  command->callback([] { measure_profiler(Training(layers, width, batch), steps, rounds); });
}
