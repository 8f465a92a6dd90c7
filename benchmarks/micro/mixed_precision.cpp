// Measures the cost of an AutocastGuard and a GradScaler where they change nothing, and the gain of
// bfloat16 where matrix products dominate: by autocast, and by the wrapper's MixedPrecision. One
// process, one thread.
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include <ddp/autocast.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/grad_scaler.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "in_turns.h"
#include "micro.h"

namespace {

struct Task {
  torch::nn::Sequential net;
  at::Tensor input, target;
};

Task make_mlp(int64_t width, int64_t batch) {
  torch::manual_seed(0);
  Task task;
  for (int layer = 0; layer < 4; ++layer) {
    task.net->push_back(torch::nn::Linear(width, width));
    task.net->push_back(torch::nn::ReLU());
  }
  task.input = torch::randn({batch, width});
  task.target = torch::randn({batch, width});
  return task;
}

/// A step of a wrapped copy of the task's model, so that the other ways do not run its hooks.
std::function<void()> wrapped_step(Task task) {
  task.net = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(task.net->clone());
  ddp::DistributedDataParallel model(
      task.net, ddp::DistributedDataParallelOptions().mixed_precision(
                    ddp::MixedPrecision().param_dtype(at::kBFloat16)));
  const auto optimizer = std::make_shared<torch::optim::SGD>(task.net->parameters(), 1e-4);
  return [task, model, optimizer]() mutable {
    optimizer->zero_grad();
    torch::nn::functional::mse_loss(model->forward(task.input).to(at::kFloat), task.target)
        .backward();
    optimizer->step();
  };
}

void measure_mixed_precision(const char* title, const Task& task, int steps, int rounds) {
  // The ways share model and optimizer: none of them changes the cost of a step.
  torch::optim::SGD optimizer(task.net->parameters(), 1e-4);
  ddp::GradScaler scaler;
  const auto loss_of = [task] {
    auto net = task.net;
    return torch::nn::functional::mse_loss(net->forward(task.input), task.target);
  };
  const auto under = [loss_of](const ddp::AutocastOptions& options) {
    const ddp::AutocastGuard autocast(torch::kCPU, options);
    return loss_of();
  };
  const auto plain = [&] {
    optimizer.zero_grad();
    loss_of().backward();
    optimizer.step();
  };
  const auto guarded = [&] {
    optimizer.zero_grad();
    scaler.scale(under(ddp::AutocastOptions().enabled(false))).backward();
    scaler.step(optimizer);
    scaler.update();
  };
  const auto bfloat16 = [&] {
    optimizer.zero_grad();
    under(at::kBFloat16).backward();
    optimizer.step();
  };
  const auto some = [steps](const std::function<void()>& step) {
    return [steps, step] {
      return benchmarks::milliseconds([&] {
               for (int i = 0; i < steps; ++i) step();
             }) /
             steps;
    };
  };
  std::vector<benchmarks::Way> ways{
      {"float32", some(plain)},
      {"float32, guard and scaler", some(guarded)},
      {"bfloat16, autocast", some(bfloat16)},
      {"bfloat16, MixedPrecision", some(wrapped_step(task))}};
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  benchmarks::print_ways(title, "ms a step", ways);
}

}  // namespace

void benchmarks::add_mixed_precision(CLI::App& app) {
  auto* command = app.add_subcommand(
      "mixed_precision", "Steps in bfloat16 and under a GradScaler, beside plain float32.");
  static int steps = 20;
  static int rounds = 21;
  command->add_option("--steps", steps, "Steps in a row")->check(CLI::Range(1, 1000000));
  command->add_option("--rounds", rounds, "Turns of each")->check(CLI::Range(1, 1000000));
  command->callback([] {
    ddp::init_process_group();
    measure_mixed_precision("4 x Linear(512), batch 32", make_mlp(512, 32), steps, rounds);
    measure_mixed_precision(
        "4 x Linear(2048), batch 256", make_mlp(2048, 256), std::max(1, steps / 10), rounds);
    ddp::destroy_process_group();
  });
}
