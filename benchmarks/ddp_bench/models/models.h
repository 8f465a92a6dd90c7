#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace ddp_bench {

/// A network of the benchmark: one tensor in, one out.
class Net : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

/// The parts of a step that do not depend on how gradients are averaged.
struct Task {
  std::shared_ptr<Net> net;
  at::Tensor input;
  at::Tensor target;
  at::Tensor (*loss)(const at::Tensor& output, const at::Tensor& target) = nullptr;
};

/// "mnist", "mlp", ...
std::vector<std::string> model_names();

/// The device, dtype and batch size of a task.
struct TaskOptions {
  c10::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;  // of parameters, and of data that are not integers
  int64_t batch = 1;                  // factor of the model's own batch size
};

/// The model with that name, and one batch of random data, the same in every step.
///
/// The parameters depend on the seed alone, the data on seed and rank. benchmarks/peers/
/// peer_models.py makes the same tasks, to the bit.
Task make_task(const std::string& model, int64_t seed, int rank, const TaskOptions& options = {});

}  // namespace ddp_bench
