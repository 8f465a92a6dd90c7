#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include "benchmarks/ddp_bench/models/models.h"

namespace ddp_bench {

using Clock = std::chrono::steady_clock;

inline double milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// CPU time of all threads of this process so far.
double cpu_ms();

/// The times at which the parts of one step ended.
struct StepTimes {
  Clock::time_point start;
  Clock::time_point forward;   // with the loss
  Clock::time_point backward;  // gradients are averaged: the optimizer can use them, or has
  Clock::time_point end;

  double total_ms() const { return milliseconds(start, end); }
};

/// The messages of a step.
struct Messages {
  std::vector<int64_t> elements;   // by message, in floats: two elements of 16 bits count as one
  bool one_by_one = false;         // each waits for the one before
  bool in_backend_memory = false;  // in memory from allocateTensor, as the Reducer's buckets
};

/// One way to train: a replica of the model, its optimizer, and a way to average the gradients.
class Engine {
 public:
  explicit Engine(Task task);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Zeroes the gradients, runs forward, loss and backward, averages, and steps SGD.
  ///
  /// Collective: yes, and it returns on no rank before all ranks have ended backward.
  StepTimes step();

  /// The messages of a step; final after the warm-up.
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
