#include "pipeline/chunk.h"

#include <cstddef>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {
namespace {

at::Tensor leaf_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.detach().requires_grad_(c10::GradMode::is_enabled() && tensor.requires_grad());
}

/// A tensor without elements at the same place of the graph.
at::Tensor graph_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return at::Tensor();
  auto graph = at::empty({0}, tensor.options());
  torch::autograd::impl::set_gradient_edge(graph, torch::autograd::impl::gradient_edge(tensor));
  return graph;
}

}  // namespace

StageChunk::StageChunk(const detail::StageModule& module, int64_t backwards, bool reduces_each)
    : module_(module),
      reduces_each_(reduces_each),
      backwards_left_(backwards),
      use_(*module.module) {}

std::optional<StageChunk::Tensors> StageChunk::forward(int64_t microbatch, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(leaf_of(input));
  if (backwards_left_ > 0) kept_[microbatch].inputs = leaves;
  return module_.forward(leaves);
}

void StageChunk::keep_graph(int64_t microbatch, const Tensors& outputs) {
  auto& kept = kept_[microbatch];
  for (const auto& output : outputs) {
    kept.outputs.push_back(graph_of(output));
    kept.sizes.push_back(output.defined() ? output.sizes().vec() : std::vector<int64_t>());
  }
}

// The other replicas reduce, even if no gradient arrives here.
void StageChunk::sync(const Kept& kept, Tensors& gradients) {
  for (size_t k = 0; k < gradients.size(); ++k) {
    const auto& output = kept.outputs[k];
    if (output.defined() && !gradients[k].defined()) {
      gradients[k] = at::zeros(kept.sizes[k], output.options().requires_grad(false));
    }
  }
  module_.sync_in_backward(kept.outputs);
}

StageChunk::Tensors StageChunk::backward(int64_t microbatch, const Tensors& gradients) {
  const auto kept = std::move(kept_.at(microbatch));
  kept_.erase(microbatch);
  --backwards_left_;
  auto given = gradients;
  if ((reduces_each_ || backwards_left_ == 0) && module_.reduces()) sync(kept, given);
  Tensors roots, root_gradients;
  for (size_t k = 0; k < given.size(); ++k) {
    if (!given[k].defined() || !kept.outputs.at(k).defined()) continue;
    roots.push_back(kept.outputs[k]);
    root_gradients.push_back(given[k]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
  Tensors of_inputs;
  for (const auto& input : kept.inputs) {
    const auto& gradient = input.defined() ? input.grad() : input;
    of_inputs.push_back(
        gradient.defined() && gradient.is_sparse() ? gradient.to_dense() : gradient);
  }
  return of_inputs;
}

}  // namespace ddp
