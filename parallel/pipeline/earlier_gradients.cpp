#include "pipeline/earlier_gradients.h"

#include <cstddef>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace ddp {

EarlierGradients::EarlierGradients(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : parameters_) {
    auto& gradient = parameter.mutable_grad();
    // A copy, because a wrapper may write the step's gradient into the same memory.
    gradients_.push_back(gradient.defined() ? gradient.clone() : gradient);
    gradient.reset();
  }
}

void EarlierGradients::add() const {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = parameters_[i].mutable_grad();
    if (!gradient.defined()) {
      gradient = gradients_[i];
    } else if (gradients_[i].defined()) {
      gradient.add_(gradients_[i]);
    }
  }
}

}  // namespace ddp
