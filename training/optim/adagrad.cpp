#include <ATen/ops/_fused_adagrad.h>
#include <c10/core/GradMode.h>
#include <ddp/optim.h>

#include "optim/fused_batch.h"

namespace ddp::optim {

void Adagrad::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  using State = torch::optim::AdagradParamState;
  const c10::NoGradGuard no_grad;
  auto batches = fused_batches("ddp::optim::Adagrad", *this, {grad_scale, found_inf});
  for (size_t g = 0; g < batches.size(); ++g) {
    const auto& options = static_cast<const AdagradOptions&>(param_groups()[g].options());
    for (auto& batch : batches[g]) {
      std::vector<at::Tensor> sums;
      for (const auto& p : batch.parameters()) {
        auto& slot = state()[p.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<State>();
        auto& sum = static_cast<State&>(*slot).sum();
        sums.push_back(batch.like_parameter(sum, p, options.initial_accumulator_value()));
      }
      const auto counts = counts_.advance(batch.parameters(), count_of());
      rates_.with(g, batch.device(), options.lr(), [&](const auto& rate) {
        at::_fused_adagrad_(
            batch.parameters(), batch.gradients(), sums, counts, rate, options.lr_decay(),
            options.weight_decay(), options.eps(), /*maximize=*/false, batch.grad_scale(),
            batch.found_inf());
      });
      if (batch.found_inf()) counts_.take_back(batch.parameters(), *batch.found_inf(), count_of());
      batch.finish();
    }
  }
}

}  // namespace ddp::optim
