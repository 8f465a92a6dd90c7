// Hooks of parameters that a copy of a module needs, too.
#pragma once

#include <memory>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/module.h>

namespace ddp {

/// A hook of a leaf that a wrapper's clone() gives the copy's leaf: torch::nn::Module::clone()
/// makes new parameters without hooks.
class CarriedHook : public torch::autograd::FunctionPreHook {
 public:
  virtual std::unique_ptr<torch::autograd::FunctionPreHook> copy() const = 0;
};

/// Gives the parameters of `to`, a clone, copies of the hooks that those of `from` have.
void carry_hooks(const torch::nn::Module& from, const torch::nn::Module& to);

}  // namespace ddp
