// Measures the cost of the reducer itself: one rank, 800 small parameters, no communication. Prints
// for each engine the median time of a step above that of a step without any, in one interleaved
// run.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "benchmarks/median.h"

#include "costs.h"

namespace {

using std::chrono::steady_clock;

// 200 blocks of Linear(32, 32) and LayerNorm(32): 800 parameters.
torch::nn::Sequential make_blocks(int blocks) {
  torch::nn::Sequential net;
  for (int i = 0; i < blocks; ++i) {
    net->push_back(torch::nn::Linear(32, 32));
    net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
  }
  return net;
}

// A way to train: its calls around forward and backward.
class Engine {
 public:
  Engine(std::string name, torch::nn::Sequential net)
      : name_(std::move(name)), net_(std::move(net)), x_(torch::randn({8, 32})) {}
  virtual ~Engine() = default;

  const std::string& name() const { return name_; }

  // Median of the steps of a turn; milliseconds. The first step does not count: the caches hold
  // another engine's data, as they never do in a training loop.
  double turn() {
    constexpr int kSteps = 4;
    step();
    std::vector<double> times;
    for (int i = 0; i < kSteps; ++i) times.push_back(step());
    return benchmarks::median(std::move(times));
  }

 protected:
  virtual at::Tensor forward(const at::Tensor& x) { return net_->forward(x); }
  torch::nn::Sequential& net() { return net_; }

 private:
  // One step without an optimizer; milliseconds.
  double step() {
    for (const auto& p : net_->parameters()) p.mutable_grad().reset();
    const auto start = steady_clock::now();
    const auto loss = forward(x_).sum();
    loss.backward();
    return std::chrono::duration<double, std::milli>(steady_clock::now() - start).count();
  }

  std::string name_;
  torch::nn::Sequential net_;
  at::Tensor x_;
};

class Wrapped : public Engine {
 public:
  Wrapped(
      std::string name, const torch::nn::Sequential& net,
      const ddp::DistributedDataParallelOptions& options)
      : Engine(std::move(name), net), model_(net, options) {}

 protected:
  at::Tensor forward(const at::Tensor& x) override { return model_->forward(x); }

 private:
  ddp::DistributedDataParallel<torch::nn::Sequential> model_;
};

// An empty hook on every parameter: measures autograd's own cost of hooks.
class Hooked : public Engine {
 public:
  Hooked(std::string name, const torch::nn::Sequential& net) : Engine(std::move(name), net) {
    for (const auto& p : net->parameters()) {
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(p));
      accumulators_.back()->add_post_hook(std::make_unique<Hook>());
    }
  }

 private:
  class Hook : public torch::autograd::FunctionPostHook {
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& /*gradients*/) override {
      return outputs;
    }
  };

  std::vector<decltype(torch::autograd::Edge::function)> accumulators_;
};

// c10d's Reducer in the sequence in which Python's wrapper drives it.
class C10d : public Engine {
 public:
  C10d(
      std::string name, const torch::nn::Sequential& net, const ddp::ProcessGroup& group,
      bool find_unused)
      : Engine(std::move(name), net) {
    const auto parameters = net->parameters();
    std::unordered_map<size_t, std::string> names;
    for (size_t i = 0; i < parameters.size(); ++i) names[i] = std::to_string(i);
    const std::vector<bool> sparse(parameters.size(), false);
    const size_t limit = find_unused ? size_t{1} << 20 : std::numeric_limits<int64_t>::max();
    auto buckets = std::get<0>(
        c10d::compute_bucket_assignment_by_size(parameters, {limit, size_t{25} << 20}, sparse, {}));
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_shared<c10d::Reducer>(
        parameters, buckets, group, sparse, int64_t{25} << 20, find_unused, false, names,
        int64_t{1} << 20, false, false, std::vector<int64_t>());
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    logger_->set_construction_data_and_log("overhead", {}, -1, false, false, false);
  }

 protected:
  at::Tensor forward(const at::Tensor& x) override {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
    auto y = net()->forward(x);
    reducer_->prepare_for_backward({y});
    return y;
  }

 private:
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

std::vector<std::unique_ptr<Engine>> make_engines(int blocks, const ddp::ProcessGroup& group) {
  using Options = ddp::DistributedDataParallelOptions;
  std::vector<std::unique_ptr<Engine>> engines;
  const auto wrapped = [&](const char* name, const Options& options) {
    engines.push_back(std::make_unique<Wrapped>(name, make_blocks(blocks), options));
  };
  engines.push_back(std::make_unique<Engine>("none", make_blocks(blocks)));
  engines.push_back(std::make_unique<Hooked>("empty hooks", make_blocks(blocks)));
  wrapped("ddp", Options());
  wrapped("ddp, views", Options().gradient_as_bucket_view(true));
  wrapped("ddp, unused", Options().find_unused_parameters(true));
  wrapped("ddp, static", Options().static_graph(true));
  engines.push_back(std::make_unique<C10d>("c10d", make_blocks(blocks), group, false));
  engines.push_back(std::make_unique<C10d>("c10d, unused", make_blocks(blocks), group, true));
  return engines;
}

/// The times of each engine's turns, in milliseconds.
std::vector<std::vector<double>> time_in_turns(
    const std::vector<std::unique_ptr<Engine>>& engines, int rounds) {
  std::vector<std::vector<double>> times(engines.size());
  constexpr int kWarmUp = 10;  // more steps than the rebuild takes
  for (int round = -kWarmUp; round < rounds; ++round) {
    for (size_t i = 0; i < engines.size(); ++i) {
      // Every other round in the opposite order: an engine gains from the caches that the one
      // before warmed, and so all gain alike.
      const size_t e = round % 2 ? engines.size() - 1 - i : i;
      const double ms = engines[e]->turn();
      if (round >= 0) times[e].push_back(ms);
    }
  }
  return times;
}

void print_table(
    const std::vector<std::unique_ptr<Engine>>& engines,
    const std::vector<std::vector<double>>& times, int parameters) {
  std::printf("%-14s %10s %12s %14s\n", "engine", "step ms", "above none", "us / parameter");
  for (size_t e = 0; e < engines.size(); ++e) {
    // Differences within a round: the machine's speed drifts by more than the measured difference.
    std::vector<double> above;
    for (size_t r = 0; r < times[e].size(); ++r) above.push_back(times[e][r] - times[0][r]);
    const double extra = benchmarks::median(std::move(above));
    std::printf(
        "%-14s %10.3f %12.3f %14.3f\n", engines[e]->name().c_str(), benchmarks::median(times[e]),
        extra, extra * 1000 / parameters);
  }
}

void measure_engines(int blocks, int rounds, const std::string& only) {
  const auto group = ddp::init_process_group(ddp::ProcessGroupOptions()
                                                 .backend("gloo")
                                                 .store(c10::make_intrusive<c10d::HashStore>())
                                                 .rank(0)
                                                 .world_size(1));
  auto engines = make_engines(blocks, group);
  const auto skipped = [&](const auto& engine) {
    return !only.empty() && engine->name() != only && engine->name() != "none";
  };
  engines.erase(std::remove_if(engines.begin(), engines.end(), skipped), engines.end());
  print_table(engines, time_in_turns(engines, rounds), 4 * blocks);
  engines.clear();
  ddp::destroy_process_group();
}

}  // namespace

void costs::add_reducer(CLI::App& app) {
  auto* command = app.add_subcommand(
      "reducer", "What the reducer adds to a step of one rank, without communication.");
  static int blocks = 200;
  static int rounds = 100;
  static std::string only;
  command->add_option("--blocks", blocks, "Blocks of four small parameters")
      ->check(CLI::Range(1, 10000));
  command->add_option("--rounds", rounds, "Turns of each engine, of four steps that count")
      ->check(CLI::Range(3, 1000000));
  command->add_option("--only", only, "Run this engine alone beside none, for a profile");
  command->callback([] { measure_engines(blocks, rounds, only); });
}
