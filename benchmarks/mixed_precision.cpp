// What an AutocastGuard and a GradScaler cost where they change nothing, and what bfloat16 gains
// where matrix products take the time: by autocast, and by the wrapper's MixedPrecision. One
// process, one thread.
//
//     mixed_precision
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/autocast.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/grad_scaler.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <CLI/CLI.hpp>

#include "median.h"

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

/// One step in a way of its own. The ways share model and optimizer: none changes what a step
/// costs.
struct Way {
  std::string name;
  std::function<void()> step;
  std::vector<double> times, ratios;
};

/// A wrapped copy of the task's model: the other ways shall not meet its hooks.
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

std::vector<Way> ways_of(const Task& task, torch::optim::SGD& optimizer, ddp::GradScaler& scaler) {
  const auto loss_of = [task] {
    auto net = task.net;
    return torch::nn::functional::mse_loss(net->forward(task.input), task.target);
  };
  const auto under = [loss_of](const ddp::AutocastOptions& options) {
    const ddp::AutocastGuard autocast(torch::kCPU, options);
    return loss_of();
  };
  const auto plain = [&optimizer, loss_of] {
    optimizer.zero_grad();
    loss_of().backward();
    optimizer.step();
  };
  const auto guarded = [&optimizer, &scaler, under] {
    optimizer.zero_grad();
    scaler.scale(under(ddp::AutocastOptions().enabled(false))).backward();
    scaler.step(optimizer);
    scaler.update();
  };
  const auto bfloat16 = [&optimizer, under] {
    optimizer.zero_grad();
    under(at::kBFloat16).backward();
    optimizer.step();
  };
  return {
      {"float32", plain, {}, {}},
      {"float32, guard and scaler", guarded, {}, {}},
      {"bfloat16, autocast", bfloat16, {}, {}},
      {"bfloat16, MixedPrecision", wrapped_step(task), {}, {}}};
}

void measure(const char* title, const Task& task, int steps, int rounds) {
  torch::optim::SGD optimizer(task.net->parameters(), 1e-4);
  ddp::GradScaler scaler;
  auto ways = ways_of(task, optimizer, scaler);
  for (auto& way : ways) way.step();
  for (int round = 0; round < rounds; ++round) {
    // In turns, each second round in the opposite order: a drift meets all alike.
    for (size_t i = 0; i < ways.size(); ++i) {
      auto& way = ways[round % 2 == 0 ? i : ways.size() - 1 - i];
      const auto start = std::chrono::steady_clock::now();
      for (int step = 0; step < steps; ++step) way.step();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      way.times.push_back(took.count() / steps);
    }
    for (auto& way : ways) way.ratios.push_back(way.times.back() / ways[0].times.back());
  }
  std::printf("%-34s %10s %10s\n", title, "ms a step", "/ float32");
  for (const auto& way : ways) {
    std::printf(
        "%-34s %10.3f %10.3f\n", way.name.c_str(), benchmarks::median(way.times),
        benchmarks::median(way.ratios));
  }
}

}  // namespace

int main(int argc, char** argv) {
  int steps = 20;
  int rounds = 21;
  CLI::App app("Steps under an AutocastGuard and with a GradScaler, beside plain float32.");
  app.add_option("--steps", steps, "Steps in a row")->check(CLI::Range(1, 1000000));
  app.add_option("--rounds", rounds, "Turns of each")->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  ddp::init_process_group();
  measure("4 x Linear(512), batch 32", make_mlp(512, 32), steps, rounds);
  measure("4 x Linear(2048), batch 256", make_mlp(2048, 256), std::max(1, steps / 10), rounds);
  ddp::destroy_process_group();
  return 0;
}
