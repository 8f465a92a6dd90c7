// Measures when each gradient of a model is ready, in a step that sends nothing: `ddprun -n 2
// costs profile --model mlp`. The cost model (cost_model.py) adds communication to it.
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "benchmarks/ddp_bench/engines/engine.h"
#include "benchmarks/ddp_bench/engines/modes.h"
#include "benchmarks/median.h"

#include "costs.h"

namespace {

namespace autograd = torch::autograd;

constexpr int kUntimed = 3;  // steps

/// Records when autograd has accumulated a gradient.
class ReadyHook : public autograd::FunctionPostHook {
 public:
  explicit ReadyHook(ddp_bench::Clock::time_point& ready) : ready_(ready) {}
  autograd::variable_list operator()(
      const autograd::variable_list& outputs, const autograd::variable_list& /*inputs*/) override {
    ready_ = ddp_bench::Clock::now();
    return outputs;
  }

 private:
  ddp_bench::Clock::time_point& ready_;
};

class ReadyProfile {
 public:
  ReadyProfile(const std::string& model, const ddp::ProcessGroup& group)
      : group_(group),
        task_(ddp_bench::make_task(model, /*seed=*/1, group->getRank())),
        parameters_(task_.net->parameters()),
        ready_(parameters_.size()),
        ready_ms_(parameters_.size()),
        engine_(ddp_bench::make_engine(
            "none", task_, ddp::DistributedDataParallelOptions().process_group(group))) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      accumulators_.push_back(autograd::impl::grad_accumulator(parameters_[i]));
      accumulators_.back()->add_post_hook(std::make_unique<ReadyHook>(ready_[i]));
    }
  }

  void step(bool counts) {
    ddp::barrier(group_);
    const auto times = engine_->step();
    if (!counts) return;
    forward_ms_.push_back(ddp_bench::milliseconds(times.start, times.forward));
    step_ms_.push_back(times.total_ms());
    for (size_t i = 0; i < ready_.size(); ++i) {
      ready_ms_[i].push_back(ddp_bench::milliseconds(times.start, ready_[i]));
    }
  }

  /// One line of JSON. Its gradients are pairs of bytes and milliseconds since the start of the
  /// step, sorted by time.
  void print(const std::string& model) const {
    std::vector<std::pair<double, size_t>> order;
    for (size_t i = 0; i < ready_ms_.size(); ++i) {
      order.emplace_back(benchmarks::median(ready_ms_[i]), parameters_[i].nbytes());
    }
    std::sort(order.begin(), order.end());
    std::printf(
        "{\"model\": \"%s\", \"ranks\": %d, \"forward_ms\": %.4f, \"step_ms\": %.4f, "
        "\"gradients\": [",
        model.c_str(), group_->getSize(), benchmarks::median(forward_ms_),
        benchmarks::median(step_ms_));
    for (size_t i = 0; i < order.size(); ++i) {
      std::printf("%s[%zu, %.4f]", i > 0 ? ", " : "", order[i].second, order[i].first);
    }
    std::printf("]}\n");
  }

 private:
  ddp::ProcessGroup group_;
  ddp_bench::Task task_;
  std::vector<at::Tensor> parameters_;
  std::vector<ddp_bench::Clock::time_point> ready_;
  std::vector<std::vector<double>> ready_ms_;
  std::vector<double> forward_ms_;
  std::vector<double> step_ms_;
  std::vector<decltype(torch::autograd::Edge::function)> accumulators_;
  std::unique_ptr<ddp_bench::Engine> engine_;
};

}  // namespace

void costs::add_profile(CLI::App& app) {
  auto* command = app.add_subcommand("profile", "When each gradient of a model is ready.");
  static std::string model = "mlp";
  static int steps = 15;
  command->add_option("--model", model, "of ddp_bench")->capture_default_str();
  command->add_option("--steps", steps, "that are timed")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->callback([] {
    // As ddp_bench: every step frees and allocates gradients, and page faults would take longer
    // than the measured work.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    const auto group = ddp::init_process_group();
    {
      ReadyProfile profile(model, group);
      for (int i = -kUntimed; i < steps; ++i) profile.step(/*counts=*/i >= 0);
      if (group->getRank() == 0) profile.print(model);
    }
    ddp::barrier();
    ddp::destroy_process_group();
  });
}
