#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "wrapper/module_state.h"

namespace ddp {

/// An option or a part of the state of an optimizer: a number, a tensor, or a list of tensors.
struct OptimizerValue {
  std::string name;  // "lr of parameter group 0", "exp_avg of fc.weight"
  c10::IValue value;
};

/// An optimizer's options and state, by names that do not depend on the rank: options by parameter
/// group, then the state of each parameter in the groups' order. For a class that is not
/// LibTorch's, the values that its serialization writes; without a serialization, the learning
/// rate.
///
/// \param module  gives the parameters' names; parameters of no module are named by their position.
/// \param ignored  parameters whose state is left out.
std::vector<OptimizerValue> optimizer_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
    const Names& ignored);

}  // namespace ddp
