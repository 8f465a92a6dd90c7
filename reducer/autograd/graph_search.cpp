#include "autograd/graph_search.h"

#include <algorithm>

namespace ddp {

constexpr uint32_t kNowhere = UINT32_MAX;  // an edge without a function

GraphSearch::GraphSearch(const std::vector<NodePtr>& accumulators)
    : reached_(accumulators.size(), 0) {
  for (size_t i = 0; i < accumulators.size(); ++i) parameter_of_[accumulators[i].get()] = i;
}

const std::vector<char>& GraphSearch::reachable(const std::vector<Node*>& roots) {
  if (!has_last_shape(roots)) search(roots);
  return reached_;
}

// Compares the new graph with the last one, edge by edge. If all edges connect the same numbers and
// end at the same parameters, both graphs reach the same parameters.
bool GraphSearch::has_last_shape(const std::vector<Node*>& roots) {
  nodes_.clear();
  size_t edge = 0;
  const auto leads_as_before = [&](Node* node) {
    if (edge == leads_to_.size()) return false;
    const auto number = leads_to_[edge++];
    if (number == kNowhere || !node) return number == kNowhere && !node;
    if (number < nodes_.size()) return nodes_[number] == node;
    // Leaves that are no parameters, such as an input that requires a gradient, are new in each
    // graph.
    const auto* expected = accumulator_[number];
    if (expected ? expected != node : is_accumulator(node)) return false;
    nodes_.push_back(node);
    return true;
  };
  for (auto* root : roots) {
    if (!leads_as_before(root)) return false;
  }
  for (size_t next = 0; next < nodes_.size(); ++next) {
    if (nodes_[next]->num_outputs() != edges_[next]) return false;
    for (const auto& e : nodes_[next]->next_edges()) {
      if (!leads_as_before(e.function.get())) return false;
    }
  }
  return edge == leads_to_.size();
}

void GraphSearch::search(const std::vector<Node*>& roots) {
  std::fill(reached_.begin(), reached_.end(), 0);
  nodes_.clear();
  numbers_.clear();
  leads_to_.clear();
  edges_.clear();
  accumulator_.clear();
  for (auto* root : roots) leads_to_.push_back(number_of(root));
  for (size_t next = 0; next < nodes_.size(); ++next) {
    const auto& edges = nodes_[next]->next_edges();
    edges_.push_back(static_cast<Number>(edges.size()));
    for (const auto& e : edges) leads_to_.push_back(number_of(e.function.get()));
  }
}

GraphSearch::Number GraphSearch::number_of(Node* node) {
  if (!node) return kNowhere;
  const auto [at, is_new] = numbers_.emplace(node, static_cast<Number>(nodes_.size()));
  if (!is_new) return at->second;
  const auto number = at->second;
  nodes_.push_back(node);
  const bool ours = is_accumulator(node);
  accumulator_.push_back(ours ? node : nullptr);
  if (ours) reached_[parameter_of_.at(node)] = 1;
  return number;
}

bool GraphSearch::is_accumulator(const Node* node) const {
  return node->num_outputs() == 0 && parameter_of_.count(node) > 0;
}

}  // namespace ddp
