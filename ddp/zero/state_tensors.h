#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// The parts of LibTorch's state of one parameter. Which ones there are is the class's affair: the
/// same for all parameters of an optimizer.
struct StateParts {
  std::vector<at::Tensor*> tensors;  // of the parameter's shape, or undefined
  int64_t* step = nullptr;           // null: it counts none
};

/// Of Adagrad, Adam, AdamW, RMSprop and SGD.
StateParts parts_of(torch::optim::OptimizerParamState& state);

}  // namespace ddp
