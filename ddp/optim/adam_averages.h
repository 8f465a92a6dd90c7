// The averages that Adam and its kin keep.
#pragma once

#include <cmath>
#include <vector>

#include <ATen/Functions.h>
#include <ddp/elementwise_optimizers.h>

namespace ddp::optim {

struct AdamAverages {
  std::vector<at::Tensor> gradients;  // exp_avg
  std::vector<at::Tensor> squares;    // exp_avg_sq
};

/// Takes gradients into the averages of a batch's states.
template <typename Batch>
AdamAverages advanced_averages(
    const Batch& batch, const std::vector<at::Tensor>& gradients, const Betas& betas) {
  const auto [beta1, beta2] = betas;
  AdamAverages averages{
      batch.each([](auto& s) -> auto& { return s.exp_avg(); }),
      batch.each([](auto& s) -> auto& { return s.exp_avg_sq(); })};
  at::_foreach_lerp_(averages.gradients, gradients, 1 - beta1);
  at::_foreach_mul_(averages.squares, beta2);
  at::_foreach_addcmul_(averages.squares, gradients, gradients, 1 - beta2);
  return averages;
}

/// The roots of the squares without their bias to zero, and eps.
///
/// \param step  of the batch, from 1.
inline std::vector<at::Tensor> denominators_of(
    const AdamAverages& averages, double beta2, double step, double eps) {
  auto denominators = at::_foreach_div(averages.squares, 1 - std::pow(beta2, step));
  at::_foreach_sqrt_(denominators);
  at::_foreach_add_(denominators, eps);
  return denominators;
}

}  // namespace ddp::optim
