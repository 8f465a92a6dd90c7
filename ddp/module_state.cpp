#include "module_state.h"

#include <map>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/nn/modules/embedding.h>

namespace ddp {
namespace {

constexpr size_t kBroadcastBytes = size_t{250} << 20;

// Keeps the first sight of each tensor; a shared one has several names.
class FirstSights {
 public:
  bool first(const at::Tensor& t) { return seen_.insert(t.unsafeGetTensorImpl()).second; }

 private:
  std::unordered_set<const void*> seen_;
};

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
  FirstSights sights;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (tensor.defined() && !ignored.count(name) && sights.first(tensor)) {
      state.push_back({name, tensor, is_parameter});
    }
  };
  for (const auto& p : module.named_parameters()) add(p.key(), p.value(), true);
  for (const auto& b : module.named_buffers()) add(b.key(), b.value(), false);
  return state;
}

BufferFinder::BufferFinder(const torch::nn::Module& module, const Names& ignored)
    : root_(module), ignored_(ignored) {
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    owners_.push_back({child.value(), child.key() + "."});
  }
}

std::vector<at::Tensor> BufferFinder::find() const {
  std::vector<at::Tensor> found;
  FirstSights sights;
  const auto collect = [&](const torch::nn::Module& owner, const std::string& prefix) {
    if (ignored_.empty()) {
      for (const auto& b : owner.buffers(/*recurse=*/false)) {
        if (b.defined() && sights.first(b)) found.push_back(b);
      }
      return;
    }
    for (const auto& b : owner.named_buffers(/*recurse=*/false)) {
      const bool wanted = b.value().defined() && !ignored_.count(prefix + b.key());
      if (wanted && sights.first(b.value())) found.push_back(b.value());
    }
  };
  collect(root_, "");
  for (const auto& owner : owners_) collect(*owner.module, owner.prefix);
  return found;
}

namespace {

std::vector<NamedParameter> parameters_that(
    const torch::nn::Module& module, const Names& ignored, bool require_gradient) {
  std::vector<NamedParameter> found;
  FirstSights sights;
  for_each_parameter(
      module, "",
      [&](const torch::nn::Module& owner, const std::string& name, const at::Tensor& tensor) {
        if (!tensor.defined() || ignored.count(name)) return;
        if (tensor.requires_grad() != require_gradient || !sights.first(tensor)) return;
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

void broadcast_from(
    int source, const std::vector<at::Tensor>& tensors, const ProcessGroup& group,
    c10::function_ref<void(c10d::Work&)> wait) {
  if (tensors.empty() || group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> unversioned;
  unversioned.reserve(tensors.size());
  for (const auto& t : tensors) unversioned.push_back(t.variable_data());
  // A message has one dtype, which take_tensors sees to, and one device.
  std::map<c10::DeviceIndex, std::vector<at::Tensor>> by_device;
  for (const auto& t : unversioned) by_device[t.device().index()].push_back(t);
  for (const auto& [device, here] : by_device) {
    for (const auto& part : torch::utils::take_tensors(here, kBroadcastBytes)) {
      std::vector<at::Tensor> flat{at::flatten_dense_tensors(part.tensors)};
      c10d::BroadcastOptions options;
      options.rootRank = source;
      wait(*group->broadcast(flat, options));
      const auto received = at::unflatten_dense_tensors(flat.front(), part.tensors);
      for (size_t i = 0; i < received.size(); ++i) part.tensors[i].copy_(received[i]);
    }
  }
}

}  // namespace ddp
