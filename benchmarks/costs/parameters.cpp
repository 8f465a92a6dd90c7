// Measures the cost of a step above a step without communication, by the number of parameters: all
// are tiny, so only the work for each parameter grows. `ddprun -n 2 costs parameters`.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/engines/engine.h"
#include "benchmarks/ddp_bench/engines/modes.h"
#include "benchmarks/median.h"

#include "costs.h"

namespace {

constexpr int kElements = 16;  // of a parameter
constexpr int kRebuild = 6;    // more steps than the rebuild of the buckets takes

/// y = x * w_1 * w_2 * ...
class Factors : public ddp_bench::Net {
 public:
  explicit Factors(int count) {
    for (int i = 0; i < count; ++i) {
      factors_.push_back(register_parameter("w" + std::to_string(i), at::ones({kElements})));
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor y = x;
    for (const auto& factor : factors_) y = y * factor;
    return y;
  }

 private:
  std::vector<at::Tensor> factors_;
};

at::Tensor sum_loss(const at::Tensor& output, const at::Tensor& /*target*/) { return output.sum(); }

ddp_bench::Task make_task(int count) {
  ddp_bench::Task task;
  task.net = std::make_shared<Factors>(count);
  task.input = at::zeros({kElements});  // gradients are zero, so that the parameters do not change
  task.loss = sum_loss;
  return task;
}

/// The time of a step without the optimizer, whose time would grow with the parameters as well.
double step_us(ddp_bench::Engine& engine) {
  const auto times = engine.step();
  return 1000 * ddp_bench::milliseconds(times.start, times.backward);
}

void measure_parameters(int count, int rounds, const std::vector<std::string>& modes) {
  const auto group = ddp::default_group();
  std::vector<std::unique_ptr<ddp_bench::Engine>> engines;
  for (const auto& mode : modes) {
    const auto options = ddp::DistributedDataParallelOptions().process_group(group);
    engines.push_back(ddp_bench::make_engine(mode, make_task(count), options));
    for (int i = 0; i < kRebuild; ++i) engines.back()->step();
  }
  std::vector<std::vector<double>> times(engines.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < engines.size(); ++i) {
      // Every other round in the opposite order: a way gains from the caches that the one before
      // warmed, and so both gain alike.
      const size_t at = round % 2 == 1 ? engines.size() - 1 - i : i;
      engines[at]->step();  // not timed: the caches hold another engine's data
      ddp::barrier(group);
      times[at].push_back(step_us(*engines[at]));
    }
  }
  for (size_t i = 0; i < engines.size() && group->getRank() == 0; ++i) {
    // Differences within a round: the machine's speed drifts by more than the measured difference.
    std::vector<double> above;
    for (int r = 0; r < rounds; ++r) above.push_back(times[i][r] - times[0][r]);
    std::printf(
        "{\"mode\": \"%s\", \"ranks\": %d, \"parameters\": %d, \"step_us\": %.2f, "
        "\"above_none_us\": %.2f}\n",
        modes[i].c_str(), group->getSize(), count, benchmarks::median(times[i]),
        benchmarks::median(above));
    std::fflush(stdout);
  }
  engines.clear();
  ddp::barrier(group);
}

}  // namespace

void costs::add_parameters(CLI::App& app) {
  auto* command = app.add_subcommand("parameters", "A step by the number of parameters.");
  static std::vector<int> counts = {10, 100, 1000, 10000};
  static double steps = 4e4;
  command->add_option("--counts", counts, "of parameters")
      ->delimiter(',')
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_option("--steps", steps, "parameters x steps of each mode, but 7 to 1000 steps")
      ->check(CLI::Range(1.0, 1e9))
      ->capture_default_str();
  command->callback([] {
    ddp::init_process_group();
    for (const int count : counts) {
      const int rounds = static_cast<int>(std::clamp(steps / count, 7.0, 1000.0));
      measure_parameters(count, rounds, {"none", "c10d", "ddp"});
    }
    ddp::destroy_process_group();
  });
}
