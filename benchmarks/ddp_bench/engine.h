#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include "models.h"

namespace ddp_bench {

using Clock = std::chrono::steady_clock;

inline double milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// When the parts of one step ended.
struct StepTimes {
  Clock::time_point start;
  Clock::time_point forward;   // with the loss
  Clock::time_point backward;  // gradients are what the optimizer takes, or has taken
  Clock::time_point end;

  double total_ms() const { return milliseconds(start, end); }
};

/// What a step sends of gradients.
struct Messages {
  std::vector<int64_t> elements;   // of each, in float: two of 16 bits are one
  bool one_by_one = false;         // each waits for the one before
  bool in_backend_memory = false;  // from allocateTensor, where the Reducer's is from there
};

/// One way to train: a replica of the model, its optimizer, and what makes the gradients of all
/// ranks one.
class Engine {
 public:
  explicit Engine(Task task);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Zeroes the gradients, runs forward, loss and backward, averages, and steps SGD.
  ///
  /// Collective: yes, and no rank ends it before all have come to the end of backward.
  StepTimes step();

  /// Holds from the end of the warm-up on.
  virtual Messages messages() const = 0;
  /// The size of buckets in MiB, where the engine itself chose it.
  virtual std::optional<double> chosen_cap_mb() const { return {}; }

  /// Frees the gradients, as the next step would.
  void rest() { optimizer_->zero_grad(); }

  std::vector<at::Tensor> parameters() const { return task_.net->parameters(); }

 protected:
  const Task& task() const { return task_; }
  virtual at::Tensor forward(const at::Tensor& x) { return task_.net->forward(x); }
  virtual void after_backward() {}
  virtual void optimize() { optimizer_->step(); }
  const std::shared_ptr<torch::optim::SGD>& optimizer() const { return optimizer_; }

 private:
  Task task_;
  std::shared_ptr<torch::optim::SGD> optimizer_;
};

}  // namespace ddp_bench
