#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// The parts of LibTorch's state of one parameter. The optimizer's class decides which there are,
/// so they are the same for all its parameters.
struct StateParts {
  std::vector<at::Tensor*> tensors;  // of the parameter's shape, or undefined
  int64_t* step = nullptr;           // null where the class counts no steps
};

/// For the states of Adagrad, Adam, AdamW, RMSprop and SGD.
StateParts state_parts(torch::optim::OptimizerParamState& state);

}  // namespace ddp
