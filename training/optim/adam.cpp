#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>
#include <ddp/optim.h>

#include "optim/fused_batch.h"

namespace ddp::optim {
namespace {

using AdamKernel = void (*)(
    at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList steps, double lr,
    double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf);

/// Steps Adam or AdamW, which differ in the kernel alone.
template <typename Options, typename State>
void step_adam(
    const char* subject, AdamKernel kernel, torch::optim::Optimizer& optimizer,
    detail::StepCounts& counts, const detail::StepCounts::CountOf& count_of,
    const StepScaling& scaling) {
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
      kernel(
          batch.parameters(), batch.gradients(), exp_avgs, exp_avg_sqs, max_exp_avg_sqs,
          counts.advance(batch.parameters(), count_of), options.lr(), beta1, beta2,
          options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false,
          batch.grad_scale(), batch.found_inf());
      if (batch.found_inf()) counts.take_back(batch.parameters(), *batch.found_inf(), count_of);
      batch.finish();
    }
  }
}

}  // namespace

void Adam::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  step_adam<AdamOptions, torch::optim::AdamParamState>(
      "ddp::optim::Adam", &at::_fused_adam_, *this, counts_, count_of(), {grad_scale, found_inf});
}

void AdamW::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  step_adam<AdamWOptions, torch::optim::AdamWParamState>(
      "ddp::optim::AdamW", &at::_fused_adamw_, *this, counts_, count_of(), {grad_scale, found_inf});
}

}  // namespace ddp::optim
