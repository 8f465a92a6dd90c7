#include "wrapper/module_state.h"

#include <ddp/detail/running_statistics.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include "wrapper/seen_tensors.h"

namespace ddp {
namespace {

bool has_sparse_gradients(const torch::nn::Module& owner) {
  if (const auto* embedding = owner.as<torch::nn::EmbeddingImpl>()) {
    return embedding->options.sparse();
  }
  if (const auto* bag = owner.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

// Calls `visit(owner, full name, tensor)` for every parameter, in pre-order.
template <typename Visit>
void for_each_parameter(const torch::nn::Module& module, const std::string& prefix, Visit visit) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    visit(module, prefix + parameter.key(), parameter.value());
  }
  for (const auto& child : module.named_children()) {
    for_each_parameter(*child.value(), prefix + child.key() + ".", visit);
  }
}

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

// The names of buffers do not tell: a module of the program's own may compute with buffers of the
// same names.
bool detail::has_running_statistics(const torch::nn::Module& owner) {
  if (!owner.is_training()) return false;
  return owner.as<torch::nn::BatchNorm2dImpl>() || owner.as<torch::nn::BatchNorm1dImpl>() ||
         owner.as<torch::nn::BatchNorm3dImpl>() ||
         dynamic_cast<const detail::HasRunningStatistics*>(&owner) != nullptr;
}

namespace {

void collect_buffers(
    const torch::nn::Module& owner, const std::string& prefix, const Names& ignored,
    SeenTensors& seen, FoundBuffers& found) {
  std::vector<at::Tensor> own;
  if (ignored.empty()) {  // building names takes time
    own = owner.buffers(/*recurse=*/false);
  } else {
    for (const auto& b : owner.named_buffers(/*recurse=*/false)) {
      if (!ignored.count(prefix + b.key())) own.push_back(b.value());
    }
  }
  const bool are_statistics = own.size() >= 2 && detail::has_running_statistics(owner);
  for (const auto& buffer : own) {
    if (!buffer.defined() || !seen.add(buffer)) continue;
    found.tensors.push_back(buffer);
    if (are_statistics) found.running_statistics.insert(buffer.unsafeGetTensorImpl());
  }
  if (ignored.empty()) {
    for (const auto& child : owner.children()) {
      collect_buffers(*child, prefix, ignored, seen, found);
    }
    return;
  }
  for (const auto& child : owner.named_children()) {
    collect_buffers(*child.value(), prefix + child.key() + ".", ignored, seen, found);
  }
}

}  // namespace

FoundBuffers BufferFinder::find() const {
  FoundBuffers found;
  SeenTensors seen;
  collect_buffers(root_, "", ignored_, seen, found);
  return found;
}

bool has_collectives_over(const torch::nn::Module& module, const ProcessGroup& group) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [&](const auto& part) {
    const auto* statistics = dynamic_cast<const detail::HasRunningStatistics*>(part.get());
    return statistics != nullptr && statistics->statistics_group() == group;
  });
}

namespace {

std::vector<NamedParameter> parameters_that(
    const torch::nn::Module& module, const Names& ignored, bool require_gradient) {
  std::vector<NamedParameter> found;
  SeenTensors seen;
  for_each_parameter(
      module, "",
      [&](const torch::nn::Module& owner, const std::string& name, const at::Tensor& tensor) {
        if (!tensor.defined() || ignored.count(name)) return;
        if (tensor.requires_grad() != require_gradient || !seen.add(tensor)) return;
        found.push_back({name, tensor, has_sparse_gradients(owner)});
      });
  return found;
}

}  // namespace

std::vector<NamedParameter> trained_parameters(
    const torch::nn::Module& module, const Names& ignored) {
  return parameters_that(module, ignored, /*require_gradient=*/true);
}

std::vector<NamedParameter> frozen_parameters(
    const torch::nn::Module& module, const Names& ignored) {
  return parameters_that(module, ignored, /*require_gradient=*/false);
}

}  // namespace ddp
