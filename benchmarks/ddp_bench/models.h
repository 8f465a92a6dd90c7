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

/// All that a step needs beside a way to average gradients.
struct Task {
  std::shared_ptr<Net> net;
  at::Tensor input;
  at::Tensor target;
  at::Tensor (*loss)(const at::Tensor& output, const at::Tensor& target) = nullptr;
};

/// "mnist", "mlp", ...
std::vector<std::string> model_names();

/// Where and in what a task is computed.
struct TaskOptions {
  c10::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;  // of parameters, and of data that are no whole numbers
  int64_t batch = 1;                  // times the samples that the model comes with
};

/// The model with that name, and one batch of random data, the same in every step.
///
/// The parameters depend on the seed alone, the data on seed and rank. benchmarks/peers/
/// peer_models.py makes the same tasks, to the bit.
Task make_task(const std::string& model, int64_t seed, int rank, const TaskOptions& options = {});

}  // namespace ddp_bench
