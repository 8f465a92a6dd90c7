#include "engine.h"

#include <ctime>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/cuda.h>

namespace ddp_bench {
namespace {

// Small: the data are noise, and it suffices that the parameters change.
constexpr double kLearningRate = 1e-3;

}  // namespace

double cpu_ms() {
  timespec time{};
  TORCH_CHECK(
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0,
      "CPU time: expected a clock of it, got none. The kernel has to have one.");
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

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
