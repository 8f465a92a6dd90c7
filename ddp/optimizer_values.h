#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// An option or a part of the state of an optimizer: a number, a tensor, or a list of tensors.
struct OptimizerValue {
  std::string name;  // "lr of parameter group 0", "exp_avg of fc.weight"
  c10::IValue value;
};

/// What the optimizer's own serialization writes, by names that do not depend on the rank: options
/// by parameter group, then the state of each parameter in the groups' order.
///
/// \param module  names the parameters; others are named by their place.
///
/// Cost: as torch::save.
std::vector<OptimizerValue> optimizer_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

}  // namespace ddp
