// Measures a step of each fused optimizer beside LibTorch's. One process; --threads threads.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/optim.h>
#include <torch/torch.h>

#include "in_turns.h"
#include "micro.h"

namespace {

using Parameters = std::vector<at::Tensor>;

Parameters make_parameters(int64_t tensors, int64_t numel) {
  Parameters parameters;
  for (int64_t i = 0; i < tensors; ++i) {
    parameters.push_back(torch::randn({numel}).requires_grad_());
    parameters.back().mutable_grad() = torch::randn({numel}) * 0.01;
  }
  return parameters;
}

template <typename Optimizer, typename Options>
benchmarks::Way way_of(
    const std::string& name, int64_t tensors, int64_t numel, const Options& options) {
  const auto optimizer = std::make_shared<Optimizer>(make_parameters(tensors, numel), options);
  return {name, [optimizer] { return benchmarks::milliseconds([&] { optimizer->step(); }); }};
}

/// LibTorch's optimizer first, which ratios refer to.
template <typename Plain, typename Fused, typename Options>
void measure_optimizer(
    const std::string& name, int64_t tensors, int64_t numel, int rounds, const Options& options) {
  std::vector<benchmarks::Way> ways{
      way_of<Plain>("torch::optim::" + name, tensors, numel, options),
      way_of<Fused>("ddp::optim::" + name, tensors, numel, options)};
  benchmarks::run_in_turns(ways, /*warm_up=*/2, rounds);  // the first rounds make the states
  benchmarks::print_ways("", "ms a step", ways);
}

void measure_optimizers(int64_t tensors, int64_t numel, int rounds) {
  using namespace torch::optim;
  std::printf(
      "%lld tensors of %lld elements, %d threads\n", static_cast<long long>(tensors),
      static_cast<long long>(numel), at::get_num_threads());
  measure_optimizer<AdamW, ddp::optim::AdamW>("AdamW", tensors, numel, rounds, AdamWOptions(1e-4));
  measure_optimizer<Adam, ddp::optim::Adam>("Adam", tensors, numel, rounds, AdamOptions(1e-4));
  measure_optimizer<SGD, ddp::optim::SGD>(
      "SGD", tensors, numel, rounds, SGDOptions(1e-4).momentum(0.9));
  measure_optimizer<Adagrad, ddp::optim::Adagrad>(
      "Adagrad", tensors, numel, rounds, AdagradOptions(1e-4));
}

}  // namespace

void benchmarks::add_optimizers(CLI::App& app) {
  auto* command = app.add_subcommand(
      "optimizers", "Steps of the fused optimizers, beside those of LibTorch's.");
  static int64_t tensors = 200;
  static int64_t numel = 100000;
  static int rounds = 21;
  static int threads = 1;
  command->add_option("--tensors", tensors, "Parameters")->check(CLI::Range(1, 100000));
  command->add_option("--numel", numel, "Elements of each")->check(CLI::Range(1, 100000000));
  command->add_option("--rounds", rounds, "Steps of each, in turns")->check(CLI::Range(1, 1000000));
  command->add_option("--threads", threads, "Of a step")->check(CLI::Range(1, 1000));
  command->callback([] {
    at::set_num_threads(threads);
    measure_optimizers(tensors, numel, rounds);
  });
}
