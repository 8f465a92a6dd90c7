#include <ddp/optim.h>

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/ranges.h>

#include "optim/fused_batch.h"

namespace ddp::optim {
namespace {

/// Parameters that have, or have not, been stepped with momentum before: the kernel takes one kind
/// at a time.
struct SgdLists {
  std::vector<at::Tensor> parameters, gradients, momenta;

  /// \param rate  a number or a tensor.
  template <typename Rate>
  void step(
      const FusedBatch& batch, const SGDOptions& options, const Rate& rate,
      bool is_first_step) const {
    if (parameters.empty()) return;
    at::_fused_sgd_(
        parameters, gradients, momenta, options.weight_decay(), options.momentum(), rate,
        options.dampening(), options.nesterov(), /*maximize=*/false, is_first_step,
        batch.grad_scale(), batch.found_inf());
  }
};

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

bool SGD::takes_found_inf() const {
  return all_of(param_groups(), [](const auto& group) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    return options.momentum() == 0 || options.dampening() == 0;
  });
}

// The momentum of a first step that found_inf skips stays zero, and the next step makes of it what
// a first step does: without dampening, the gradient.
void SGD::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  using State = torch::optim::SGDParamState;
  const c10::NoGradGuard no_grad;
  auto batches = fused_batches("ddp::optim::SGD", *this, {grad_scale, found_inf});
  for (size_t g = 0; g < batches.size(); ++g) {
    const auto& options = static_cast<const SGDOptions&>(param_groups()[g].options());
    for (auto& batch : batches[g]) {
      SgdLists first, later;
      for (size_t i = 0; i < batch.parameters().size(); ++i) {
        const auto& p = batch.parameters()[i];
        SgdLists* lists = &later;
        if (options.momentum() != 0) {
          auto& slot = state()[p.unsafeGetTensorImpl()];
          if (!slot) slot = std::make_unique<State>();
          auto& momentum = static_cast<State&>(*slot).momentum_buffer();
          if (!momentum.defined()) lists = &first;
          lists->momenta.push_back(batch.like_parameter(momentum, p));
        }
        lists->parameters.push_back(p);
        lists->gradients.push_back(batch.gradients()[i]);
      }
      rates_.with(g, batch.device(), options.lr(), [&](const auto& rate) {
        first.step(batch, options, rate, /*is_first_step=*/true);
        later.step(batch, options, rate, /*is_first_step=*/false);
      });
      batch.finish();
    }
  }
}

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
