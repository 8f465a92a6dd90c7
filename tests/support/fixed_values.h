// Parameters with values that depend on nothing else: the ranks' threads share one generator.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <torch/nn/module.h>

namespace ddp::testing {

/// Makes a module double, and gives its parameters values between -1 and 1 by their order.
inline void set_fixed_values(torch::nn::Module& module) {
  module.to(at::kDouble);
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (auto& p : module.parameters()) {
    p.copy_((at::arange(p.numel(), at::kDouble) * 1.1 + ++phase).sin().view(p.sizes()));
  }
}

}  // namespace ddp::testing
