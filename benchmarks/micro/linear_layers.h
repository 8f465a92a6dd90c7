#pragma once

#include <cstdint>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

namespace benchmarks {

/// A net of `layers` x (width + 1) x width parameters, the same in each call.
inline torch::nn::Sequential make_linear_layers(int64_t layers, int64_t width) {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int64_t layer = 0; layer < layers; ++layer) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

}  // namespace benchmarks
