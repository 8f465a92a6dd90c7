#include "wrapper/model_tensors.h"

#include <algorithm>

#include <ddp/internal/text.h>

namespace ddp {
namespace {

std::string outside_name(size_t i) { return ddp::str("also_average[", i, "]"); }

}  // namespace

std::vector<NamedParameter> ModelTensors::trained() const {
  auto parameters = trained_parameters(*module_, ignored_);
  for (size_t i = 0; i < outside_.size(); ++i) {
    parameters.push_back({outside_name(i), outside_[i], false, /*is_outside=*/true});
  }
  return parameters;
}

std::vector<StateTensor> ModelTensors::state(bool with_buffers) const {
  auto state = module_state(*module_, ignored_);
  if (!with_buffers) {
    const auto is_buffer = [](const StateTensor& s) { return !s.is_parameter; };
    state.erase(std::remove_if(state.begin(), state.end(), is_buffer), state.end());
  }
  for (size_t i = 0; i < outside_.size(); ++i) state.push_back({outside_name(i), outside_[i]});
  return state;
}

void ModelTensors::zero_grad(bool set_to_none) const {
  module_->zero_grad(set_to_none);
  for (const auto& tensor : outside_) {
    at::Tensor& grad = tensor.mutable_grad();
    if (!grad.defined()) continue;
    set_to_none ? grad.reset() : void(grad = grad.detach().zero_());
  }
}

std::vector<std::string> ModelTensors::unfrozen() const {
  std::vector<std::string> names;
  for (const auto& p : frozen_) {
    if (p.tensor.requires_grad()) names.push_back(p.name);
  }
  return names;
}

std::vector<MissingGradient> ModelTensors::explain_missing(
    const std::vector<NamedParameter>& trained, const std::vector<size_t>& which) const {
  const std::string remedy = "Call model->refresh() on every rank.";
  const auto now = module_->named_parameters();
  std::vector<MissingGradient> reasons;
  for (const size_t parameter : which) {
    const auto& known = trained[parameter];
    const auto* tensor = now.find(known.name);
    auto& reason = reasons.emplace_back();
    if (known.is_outside) continue;
    if (!tensor || !tensor->is_same(known.tensor)) {
      reason = {"replaced in the module after it was wrapped", remedy};
    } else if (!tensor->requires_grad()) {
      reason = {"frozen after the module was wrapped", remedy};
    }
  }
  return reasons;
}

}  // namespace ddp
