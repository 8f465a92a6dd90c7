// A small network on a GPU and functions that train it, for tests with one rank.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

namespace ddp::testing {

using CudaNet = torch::nn::Sequential;

/// A network with the same weights each time.
inline CudaNet make_cuda_net() {
  CudaNet net(
      torch::nn::Linear(64, 128), torch::nn::ReLU(), torch::nn::Linear(128, 128), torch::nn::ReLU(),
      torch::nn::Linear(128, 8));
  draw_normal(*net, 0.1);
  net->to(c10::Device(at::kCUDA, 0));
  return net;
}

/// The batch of a step.
inline at::Tensor cuda_batch(uint64_t step) {
  auto chance = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  return torch::randn({32, 64}, chance).to(c10::Device(at::kCUDA, 0));
}

/// One step, with a wrapper or without.
template <typename Model>
at::Tensor train_step(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  const auto loss = model->forward(x).pow(2).mean();
  loss.backward();
  optimizer.step();
  return loss.detach();
}

inline at::Tensor flat_parameters(const CudaNet& net) { return flattened(net->parameters()).cpu(); }

/// The parameters after `steps` steps without a wrapper, concatenated.
inline at::Tensor train_plainly(int steps) {
  auto net = make_cuda_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    train_step(net, optimizer, cuda_batch(step));
    torch::cuda::synchronize();
  }
  return flat_parameters(net);
}

/// A wrapped net over one rank's group.
struct CudaTrainer {
  explicit CudaTrainer(
      const Rank& self, const DistributedDataParallelOptions& options = {}, CommHook hook = nullptr)
      : model(net, with_group(options, self)), optimizer(net->parameters(), 0.1) {
    if (hook) model->register_comm_hook(std::move(hook));
  }

  at::Tensor step(const at::Tensor& x) { return train_step(model, optimizer, x); }

  static DistributedDataParallelOptions with_group(
      DistributedDataParallelOptions options, const Rank& self) {
    return options.process_group(self.group);
  }

  CudaNet net = make_cuda_net();
  DistributedDataParallel<CudaNet> model;
  torch::optim::SGD optimizer;
};

}  // namespace ddp::testing
