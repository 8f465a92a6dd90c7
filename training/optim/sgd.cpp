#include <algorithm>

#include <ATen/ops/_fused_sgd.h>
#include <c10/core/GradMode.h>
#include <ddp/optim.h>

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

}  // namespace

bool SGD::takes_found_inf() const {
  return std::all_of(param_groups().begin(), param_groups().end(), [](const auto& group) {
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

}  // namespace ddp::optim
