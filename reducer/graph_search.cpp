#include "graph_search.h"

#include <algorithm>

#include <torch/csrc/autograd/variable.h>

namespace ddp {

GraphSearch::GraphSearch(const std::vector<std::shared_ptr<torch::autograd::Node>>& accumulators)
    : reached_(accumulators.size(), 0) {
  for (size_t i = 0; i < accumulators.size(); ++i) parameter_of_[accumulators[i].get()] = i;
}

const std::vector<char>& GraphSearch::reachable(const std::vector<at::Tensor>& outputs) {
  std::fill(reached_.begin(), reached_.end(), 0);
  seen_.clear();
  const auto visit = [&](torch::autograd::Node* node) {
    if (node && seen_.insert(node).second) stack_.push_back(node);
  };
  for (const auto& output : outputs) {
    // A parameter that is returned as it is has an accumulator, but no grad_fn.
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!stack_.empty()) {
    auto* node = stack_.back();
    stack_.pop_back();
    if (node->num_outputs() == 0) {
      const auto at = parameter_of_.find(node);
      if (at != parameter_of_.end()) reached_[at->second] = 1;
      continue;
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return reached_;
}

}  // namespace ddp
