#include "engine.h"

#include <utility>

#include <torch/cuda.h>

namespace ddp_bench {
namespace {

// Small: the data are noise, and it suffices that the parameters change.
constexpr double kLearningRate = 1e-3;

}  // namespace

Engine::Engine(Task task)
    : task_(std::move(task)),
      optimizer_(std::make_shared<torch::optim::SGD>(task_.net->parameters(), kLearningRate)) {}

StepTimes Engine::step() {
  StepTimes times;
  times.start = Clock::now();
  optimizer_->zero_grad();
  const auto loss = task_.loss(forward(task_.input), task_.target);
  times.forward = Clock::now();
  loss.backward();
  after_backward();
  times.backward = Clock::now();
  optimize();
  if (task_.input.is_cuda()) torch::cuda::synchronize();
  times.end = Clock::now();
  return times;
}

}  // namespace ddp_bench
