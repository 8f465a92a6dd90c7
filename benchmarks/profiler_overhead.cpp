// What a Profiler costs a training step, outside of its active steps and within. One process, one
// thread.
//
//     profiler_overhead
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/profiler.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>
#include <CLI/CLI.hpp>

#include "linear_layers.h"
#include "median.h"

namespace {

using Clock = std::chrono::steady_clock;

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

struct Mode {
  const char* name;
  ddp::ProfilerOptions options;
  int64_t steps_before;  // those it measures have the state that the name says
  std::vector<double> ratios = {};
};

std::vector<Mode> modes() {
  const int64_t far = 1'000'000'000;
  const auto one_cycle = ddp::ProfilerOptions().active(1).repeat(1);
  return {
      {"none, again", {}, -1},
      {"waiting", ddp::ProfilerOptions().wait(far), 0},
      {"warming up", ddp::ProfilerOptions().warmup(far), 0},
      {"after its last cycle", one_cycle, 2},
      {"recording", ddp::ProfilerOptions().active(far), 0}};
}

// The mean of a block of steps, with those of a profiler that is not there.
double block_ms(Training& training, int steps, const Mode* mode) {
  std::unique_ptr<ddp::Profiler> profiler;
  if (mode != nullptr && mode->steps_before >= 0) {
    profiler = std::make_unique<ddp::Profiler>(mode->options);
    for (int64_t i = 0; i < mode->steps_before; ++i) profiler->step();
  }
  training.step();
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) {
    training.step();
    if (profiler) profiler->step();
  }
  const std::chrono::duration<double, std::milli> took = Clock::now() - start;
  return took.count() / steps;
}

double nanoseconds_of_step(const ddp::ProfilerOptions& options) {
  ddp::Profiler profiler(options);
  constexpr int kCalls = 1'000'000;
  const auto start = Clock::now();
  for (int i = 0; i < kCalls; ++i) profiler.step();
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kCalls;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t layers = 4;
  int64_t width = 128;
  int64_t batch = 32;
  int steps = 20;
  int rounds = 31;
  CLI::App app("Steps of linear layers with a Profiler in each state, beside steps without one.");
  app.add_option("--layers", layers, "One after the other")->check(CLI::Range(1, 10000));
  app.add_option("--width", width, "Of each layer")->check(CLI::Range(1, 100000));
  app.add_option("--batch", batch, "Rows of the input")->check(CLI::Range(1, 100000));
  app.add_option("--steps", steps, "In a block")->check(CLI::Range(1, 1000000));
  app.add_option("--rounds", rounds, "Blocks of each, in turns")->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  Training training(layers, width, batch);
  auto kinds = modes();
  std::vector<double> plain;
  for (int round = -1; round < rounds; ++round) {
    for (auto& mode : kinds) {
      // Before and behind: what drifts falls on both.
      const double before = block_ms(training, steps, nullptr);
      const double with = block_ms(training, steps, &mode);
      const double behind = block_ms(training, steps, nullptr);
      if (round < 0) continue;  // warms up
      plain.push_back((before + behind) / 2);
      mode.ratios.push_back(2 * with / (before + behind));
    }
  }
  std::printf("%-24s %10.4f ms a step\n", "no profiler", benchmarks::median(plain));
  for (const auto& mode : kinds) {
    std::printf("%-24s %10.4f x\n", mode.name, benchmarks::median(mode.ratios));
  }
  std::printf(
      "%-24s %10.1f ns a call\n", "step() that waits",
      nanoseconds_of_step(ddp::ProfilerOptions().wait(1'000'000'000)));
  const auto start = Clock::now();
  constexpr int kRanges = 1'000'000;
  for (int i = 0; i < kRanges; ++i) const ddp::RecordFunctionGuard range("range");
  const std::chrono::duration<double, std::nano> took = Clock::now() - start;
  std::printf("%-24s %10.1f ns each\n", "range, not recorded", took.count() / kRanges);
  return 0;
}
