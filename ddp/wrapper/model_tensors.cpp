#include "wrapper/model_tensors.h"

#include <ddp/detail/running_statistics.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/nn/modules/embedding.h>

namespace ddp {
namespace {

bool has_sparse_gradients(const torch::nn::Module& owner) {
  if (const auto* embedding = owner.as<torch::nn::EmbeddingImpl>()) {
    return embedding->options.sparse();
  }
  if (const auto* bag = owner.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

std::string outside_name(size_t i) { return ddp::str("also_average[", i, "]"); }

}  // namespace

std::vector<StateTensor> module_state(const torch::nn::Module& module, const Names& ignored) {
  std::vector<StateTensor> state;
  SeenTensors seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (tensor.defined() && !ignored.count(name) && seen.add(tensor)) {
      state.push_back({name, tensor, is_parameter});
    }
  };
  for (const auto& p : module.named_parameters()) add(p.key(), p.value(), true);
  for (const auto& b : module.named_buffers()) add(b.key(), b.value(), false);
  return state;
}

bool has_collectives_over(const torch::nn::Module& module, const ProcessGroup& group) {
  return any_of(module.modules(), [&](const auto& part) {
    const auto* statistics = dynamic_cast<const detail::HasRunningStatistics*>(part.get());
    return statistics != nullptr && statistics->statistics_group() == group;
  });
}

std::vector<NamedParameter> ModelTensors::parameters_that(bool require_gradient) const {
  std::vector<NamedParameter> found;
  SeenTensors seen;
  const auto add_from = [&](const torch::nn::Module& owner, const std::string& prefix) {
    for (const auto& item : owner.named_parameters(/*recurse=*/false)) {
      const auto name = prefix + item.key();
      const auto& tensor = item.value();
      if (!tensor.defined() || ignored_.count(name)) continue;
      if (tensor.requires_grad() != require_gradient || !seen.add(tensor)) continue;
      found.push_back({name, tensor, has_sparse_gradients(owner)});
    }
  };
  add_from(*module_, "");
  for (const auto& part : module_->named_modules("", /*include_self=*/false)) {
    add_from(*part.value(), part.key() + ".");
  }
  return found;
}

std::vector<NamedParameter> ModelTensors::trained() const {
  auto parameters = parameters_that(/*require_gradient=*/true);
  for (size_t i = 0; i < outside_.size(); ++i) {
    parameters.push_back({outside_name(i), outside_[i], false, /*is_outside=*/true});
  }
  return parameters;
}

std::vector<StateTensor> ModelTensors::state(bool with_buffers) const {
  auto state = module_state(*module_, ignored_);
  if (!with_buffers) {
    drop_if(state, [](const StateTensor& s) { return !s.is_parameter; });
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
