// Optimizers that fused_optimizers.py and python_optimizers.py step as well: with the same
// parameters, gradients and groups.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace ddp::testing {

using Tensors = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

/// Makes an optimizer of three parameters, of which the last one is a group with another rate.
template <typename Optimizer, typename Options>
MakeOptimizer make_in_groups(const Options& options) {
  return [=](const Tensors& p) {
    auto second = std::make_unique<Options>(options);
    second->lr(0.03);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Tensors{p[0], p[1]});
    groups.emplace_back(Tensors{p[2]}, std::move(second));
    return std::make_unique<Optimizer>(groups, options);
  };
}

/// Values that float, half and bfloat16 have without rounding.
inline at::Tensor whole_numbers(int64_t count, int64_t factor, int64_t shift, int64_t modulus) {
  const auto numbers = (torch::arange(count) * factor + shift).remainder(modulus) - modulus / 2;
  return numbers.to(torch::kDouble) / 32;
}

}  // namespace ddp::testing
