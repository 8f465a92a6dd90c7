// One step of the optimizers that update each element on its own: the operations of Python's, in
// their order, so that bits agree.
#include <cmath>

#include <ATen/Functions.h>
#include <ddp/elementwise_optimizers.h>

#include "optim/adam_averages.h"
#include "optim/listed_optimizer.h"

DDP_BATCHED_OPTIMIZER(ddp::optim::NAdamOptions, ddp::optim::NAdamParamState)
DDP_BATCHED_OPTIMIZER(ddp::optim::RAdamOptions, ddp::optim::RAdamParamState)
DDP_BATCHED_OPTIMIZER(ddp::optim::AdamaxOptions, ddp::optim::AdamaxParamState)
DDP_BATCHED_OPTIMIZER(ddp::optim::AdadeltaOptions, ddp::optim::AdadeltaParamState)
DDP_BATCHED_OPTIMIZER(ddp::optim::LionOptions, ddp::optim::LionParamState)

namespace ddp::optim {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The batch's gradients, with the decay of weights; where it is decoupled, the parameters decay.
template <typename Batch>
Tensors decayed(const Batch& batch, double rate, double weight_decay, bool is_decoupled) {
  if (weight_decay == 0) return batch.gradients;
  if (!is_decoupled) return at::_foreach_add(batch.gradients, batch.parameters, weight_decay);
  at::_foreach_mul_(batch.parameters, 1 - rate * weight_decay);
  return batch.gradients;
}

}  // namespace

void NAdam::step_batch(const NAdamOptions& options, const Batch& batch) {
  const auto step = static_cast<double>(batch.step);
  const auto [beta1, beta2] = options.betas();
  const auto gradients =
      decayed(batch, options.lr(), options.weight_decay(), options.decoupled_weight_decay());
  const auto averages = advanced_averages(batch, gradients, options.betas());
  const auto denominators = denominators_of(averages, beta2, step, options.eps());

  const auto momentum_at = [&, beta = beta1](double at_step) {
    return beta * (1.0 - 0.5 * std::pow(0.96, at_step * options.momentum_decay()));
  };
  const double mu = momentum_at(step), next = momentum_at(step + 1);
  std::vector<at::Scalar> of_gradients, of_averages;
  for (auto* state : batch.states) {
    // Python multiplies in float32.
    const double product = static_cast<float>(state->mu_product()) * static_cast<float>(mu);
    state->mu_product(product);
    of_gradients.emplace_back(-options.lr() * (1.0 - mu) / (1.0 - product));
    of_averages.emplace_back((-options.lr() * next) / (1.0 - product * next));
  }
  at::_foreach_addcdiv_(batch.parameters, gradients, denominators, of_gradients);
  at::_foreach_addcdiv_(batch.parameters, averages.gradients, denominators, of_averages);
}

void RAdam::step_batch(const RAdamOptions& options, const Batch& batch) {
  const auto step = static_cast<double>(batch.step);
  const auto [beta1, beta2] = options.betas();
  const auto gradients =
      decayed(batch, options.lr(), options.weight_decay(), options.decoupled_weight_decay());
  const auto averages = advanced_averages(batch, gradients, options.betas());
  const double correction = 1 - std::pow(beta2, step);
  auto updates = at::_foreach_div(averages.gradients, 1 - std::pow(beta1, step));
  at::_foreach_mul_(updates, options.lr());
  // The length of the average of squares, as if it were a simple one.
  const double longest = 2 / (1 - beta2) - 1;
  const double length = longest - 2 * step * std::pow(beta2, step) / correction;
  if (length > 5.0) {
    auto rates = at::_foreach_sqrt(averages.squares);
    at::_foreach_add_(rates, options.eps());
    at::_foreach_reciprocal_(rates);
    at::_foreach_mul_(rates, std::pow(correction, 0.5));
    at::_foreach_mul_(updates, rates);
    const double rectified = std::pow(
        (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length), 0.5);
    at::_foreach_mul_(updates, rectified);
  }
  at::_foreach_add_(batch.parameters, updates, -1);
}

void Adamax::step_batch(const AdamaxOptions& options, const Batch& batch) {
  const auto [beta1, beta2] = options.betas();
  const auto gradients =
      decayed(batch, options.lr(), options.weight_decay(), /*is_decoupled=*/false);
  const auto averages = batch.each([](auto& s) -> auto& { return s.exp_avg(); });
  const auto largest = batch.each([](auto& s) -> auto& { return s.exp_inf(); });
  at::_foreach_lerp_(averages, gradients, 1 - beta1);
  auto magnitudes = at::_foreach_abs(gradients);
  at::_foreach_add_(magnitudes, options.eps());
  at::_foreach_mul_(largest, beta2);
  at::_foreach_maximum_(largest, magnitudes);
  const double rate = options.lr() / (1 - std::pow(beta1, static_cast<double>(batch.step)));
  at::_foreach_addcdiv_(batch.parameters, averages, largest, -rate);
}

void Adadelta::step_batch(const AdadeltaOptions& options, const Batch& batch) {
  const auto gradients =
      decayed(batch, options.lr(), options.weight_decay(), /*is_decoupled=*/false);
  const auto squares = batch.each([](auto& s) -> auto& { return s.square_avg(); });
  const auto deltas = batch.each([](auto& s) -> auto& { return s.acc_delta(); });
  const auto mean_square = [&](const Tensors& means, const Tensors& values) {
    at::_foreach_mul_(means, options.rho());
    at::_foreach_addcmul_(means, values, values, 1 - options.rho());
  };
  const auto root = [&](const Tensors& means) {
    auto roots = at::_foreach_add(means, options.eps());
    at::_foreach_sqrt_(roots);
    return roots;
  };
  mean_square(squares, gradients);
  const auto updates = root(deltas);
  at::_foreach_div_(updates, root(squares));
  at::_foreach_mul_(updates, gradients);
  mean_square(deltas, updates);
  at::_foreach_add_(batch.parameters, updates, -options.lr());
}

void Lion::step_batch(const LionOptions& options, const Batch& batch) {
  const auto [beta1, beta2] = options.betas();
  decayed(batch, options.lr(), options.weight_decay(), /*is_decoupled=*/true);
  const auto averages = batch.each([](auto& s) -> auto& { return s.exp_avg(); });
  auto signs = at::_foreach_lerp(averages, batch.gradients, 1 - beta1);
  at::_foreach_sign_(signs);
  at::_foreach_add_(batch.parameters, signs, -options.lr());
  at::_foreach_lerp_(averages, batch.gradients, 1 - beta2);
}

}  // namespace ddp::optim
