// Where gradients go that a node of ours computes for parameters.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>
#include <torch/csrc/autograd/function.h>

namespace ddp {

/// Takes the gradients of values that were computed from a parameter while it is a shard, in place
/// of its accumulator, which takes whole ones.
class ShardNodeBase : public torch::autograd::Node {
 public:
  /// The accumulator of the whole parameter.
  virtual NodePtr accumulator() const = 0;
};

/// The edges to `tensors` for a node that computes with whole parameters, whether these are shards
/// now or not: as torch::autograd::collect_next_edges() otherwise.
inline torch::autograd::edge_list accumulating_edges(const std::vector<at::Tensor>& tensors) {
  auto edges = torch::autograd::collect_next_edges(tensors);
  for (auto& edge : edges) {
    const auto* shard = dynamic_cast<const ShardNodeBase*>(edge.function.get());
    if (shard != nullptr) edge.function = shard->accumulator();
  }
  return edges;
}

}  // namespace ddp
