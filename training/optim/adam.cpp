#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>
#include <ddp/optim.h>

#include "optim/fused_batch.h"

namespace ddp::optim {
namespace {

/// The numbers that an optimizer keeps on the devices apart from its state.
struct DeviceNumbers {
  detail::StepCounts& counts;
  detail::StepCounts::CountOf count_of;
  const detail::StepRates& rates;
};

/// Steps Adam or AdamW, which differ in the kernel alone.
template <typename Options, typename State, typename Kernel>
void step_adam(
    const char* subject, Kernel kernel, torch::optim::Optimizer& optimizer,
    const DeviceNumbers& numbers, const StepScaling& scaling) {
  const c10::NoGradGuard no_grad;
  auto batches = fused_batches(subject, optimizer, scaling);
  for (size_t g = 0; g < batches.size(); ++g) {
    const auto& options = static_cast<const Options&>(optimizer.param_groups()[g].options());
    const auto [beta1, beta2] = options.betas();
    for (auto& batch : batches[g]) {
      std::vector<at::Tensor> exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
      for (const auto& p : batch.parameters()) {
        auto& slot = optimizer.state()[p.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<State>();
        auto& state = static_cast<State&>(*slot);
        exp_avgs.push_back(batch.like_parameter(state.exp_avg(), p));
        exp_avg_sqs.push_back(batch.like_parameter(state.exp_avg_sq(), p));
        if (!options.amsgrad()) continue;
        max_exp_avg_sqs.push_back(batch.like_parameter(state.max_exp_avg_sq(), p));
      }
      const auto steps = numbers.counts.advance(batch.parameters(), numbers.count_of);
      numbers.rates.with(g, batch.device(), options.lr(), [&, b1 = beta1, b2 = beta2](auto& rate) {
        kernel(
            batch.parameters(), batch.gradients(), exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps,
            rate, b1, b2, options.weight_decay(), options.eps(), options.amsgrad(),
            /*maximize=*/false, batch.grad_scale(), batch.found_inf());
      });
      if (const auto& found_inf = batch.found_inf()) {
        numbers.counts.take_back(batch.parameters(), *found_inf, numbers.count_of);
      }
      batch.finish();
    }
  }
}

}  // namespace

void Adam::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  step_adam<AdamOptions, torch::optim::AdamParamState>(
      "ddp::optim::Adam", [](const auto&... arguments) { at::_fused_adam_(arguments...); }, *this,
      {counts_, count_of(), rates_}, {grad_scale, found_inf});
}

void AdamW::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  step_adam<AdamWOptions, torch::optim::AdamWParamState>(
      "ddp::optim::AdamW", [](const auto&... arguments) { at::_fused_adamw_(arguments...); }, *this,
      {counts_, count_of(), rates_}, {grad_scale, found_inf});
}

}  // namespace ddp::optim
