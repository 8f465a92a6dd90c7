#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace mnist {

/// How often training zeroes an activation; 0 makes training steps deterministic.
struct Dropout {
  double after_pool = 0.25;
  double after_fc1 = 0.5;
};

/// Two convolutions and two linear layers: [N, 1, 28, 28] images to [N, 10] log-probabilities.
/// 1.2 million parameters, of which fc1 has 1.18: 4.8 MB of gradients a step.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Dropout& dropout = {});

  at::Tensor forward(at::Tensor x);

  torch::nn::Conv2d conv1, conv2;
  torch::nn::Dropout dropout1, dropout2;
  torch::nn::Linear fc1, fc2;
};
TORCH_MODULE(Net);

}  // namespace mnist
