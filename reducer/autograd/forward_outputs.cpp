#include "autograd/forward_outputs.h"

#include <algorithm>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {

void ForwardOutputs::clear() {
  complete_ = true;
  nodes_.clear();
}

std::vector<torch::autograd::Node*> ForwardOutputs::add(
    const std::vector<at::Tensor>& outputs, bool complete) {
  // Outputs of forwards that never have a backward pass would accumulate.
  nodes_.erase(
      std::remove_if(nodes_.begin(), nodes_.end(), [](const auto& node) { return node.expired(); }),
      nodes_.end());
  complete_ = complete_ && complete;
  std::vector<Node*> added;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    complete_ = complete_ && output.grad_fn();
    const auto node = torch::autograd::impl::gradient_edge(output).function;
    nodes_.push_back(WeakNodePtr(node));
    added.push_back(node.get());
  }
  return added;
}

bool ForwardOutputs::are_in_backward() const {
  const auto* running = torch::autograd::get_current_graph_task_nodes_in_graph();
  return running && std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& node) {
           const auto alive = node.lock();
           return alive && running->count(alive.get()) > 0;
         });
}

std::vector<NodePtr> ForwardOutputs::nodes() const {
  std::vector<NodePtr> alive;
  for (const auto& node : nodes_) {
    alive.push_back(node.lock());
    if (!complete_ || !alive.back()) return {};
  }
  return alive;
}

}  // namespace ddp
