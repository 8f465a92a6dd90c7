#pragma once

#include <cstdint>
#include <cstdio>

#include <CLI/CLI.hpp>

#include <ddp/process_group.h>

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

inline void add_options_of_linear_layers(CLI::App& command, int64_t& layers, int64_t& width) {
  command.add_option("--layers", layers, "Of the model")->check(CLI::Range(1, 10000));
  command.add_option("--width", width, "Of each layer")->check(CLI::Range(1, 100000));
}

/// The heading of a table of such nets.
inline void print_linear_layers(int64_t layers, int64_t width) {
  std::printf(
      "%.1f million parameters, %d ranks\n",
      static_cast<double>(layers * width * (width + 1)) / 1e6, ddp::get_world_size());
}

}  // namespace benchmarks
