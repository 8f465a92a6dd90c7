#include <ddp/internal/accumulating_edges.h>

namespace ddp {

torch::autograd::edge_list accumulating_edges(const std::vector<at::Tensor>& tensors) {
  auto edges = torch::autograd::collect_next_edges(tensors);
  for (auto& edge : edges) {
    const auto* shard = dynamic_cast<const ShardNodeBase*>(edge.function.get());
    if (shard != nullptr) edge.function = shard->accumulator();
  }
  return edges;
}

}  // namespace ddp
