#include <ddp/lamb.h>

#include <cmath>
#include <utility>

#include <ATen/Functions.h>

#include "optim/adam_averages.h"
#include "optim/listed_optimizer.h"

DDP_BATCHED_OPTIMIZER(ddp::optim::LAMBOptions, ddp::optim::LAMBParamState)

namespace ddp::optim {

at::Tensor LAMB::step(LossClosure closure) {
  detail::check_are_whole(
      "ddp::optim::LAMB", *this,
      "Take an optimizer that updates each element on its own, as ddp::optim::AdamW; or whole "
      "layers on every rank, with a ZeroRedundancyOptimizer of LAMB.");
  return BatchedOptimizer::step(std::move(closure));
}

void LAMB::step_batch(const LAMBOptions& options, const Batch& batch) {
  const auto step = static_cast<double>(batch.step);
  const auto [beta1, beta2] = options.betas();
  const auto averages = advanced_averages(batch, batch.gradients, options.betas());
  const auto denominators = denominators_of(averages, beta2, step, options.eps());
  auto updates = at::_foreach_div(averages.gradients, 1 - std::pow(beta1, step));
  at::_foreach_div_(updates, denominators);
  if (options.weight_decay() != 0) {
    at::_foreach_add_(updates, batch.parameters, options.weight_decay());
  }
  // On the parameters' device: no step waits for a GPU.
  const auto of_parameters = at::stack(at::_foreach_norm(batch.parameters));
  const auto of_updates = at::stack(at::_foreach_norm(updates));
  const auto ratios =
      at::where(of_parameters.gt(0).logical_and(of_updates.gt(0)), of_parameters / of_updates, 1.0);
  at::_foreach_mul_(updates, ratios.to(of_parameters.scalar_type()).unbind());
  at::_foreach_add_(batch.parameters, updates, -options.lr());
}

}  // namespace ddp::optim
