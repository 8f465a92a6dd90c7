#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <c10/util/flat_hash_map.h>
#include <ddp/internal/autograd_node.h>
#include <torch/csrc/autograd/function.h>

namespace ddp {

/// Finds the parameters that a backward pass from given outputs can reach.
///
/// Remembers the shape of the last graph: its edges, between nodes numbered in the order of the
/// search. The next graph usually has the same shape; its search then compares one pointer an edge
/// and looks nothing up. At the first difference the search starts again without that memory.
///
/// Threads: one at a time.
class GraphSearch {
 public:
  /// \param accumulators  each parameter's gradient accumulator, by parameter; they have to outlive
  ///        this object.
  explicit GraphSearch(const std::vector<NodePtr>& accumulators);

  /// \param roots  the nodes that made the outputs.
  /// \return by parameter, whether the graph of `roots` contains it.
  ///
  /// Cost: visits each node of the graph once: about 5 ns an edge for a graph like the last one,
  /// 20 to 50 ns for another.
  const std::vector<char>& reachable(const std::vector<torch::autograd::Node*>& roots);

  /// Whether the graph of `roots` has the shape of the last one that reachable() searched.
  bool has_last_shape(const std::vector<torch::autograd::Node*>& roots);

 private:
  using Node = torch::autograd::Node;
  using Number = uint32_t;

  void search(const std::vector<Node*>& roots);
  Number number_of(Node* node);
  bool is_accumulator(const Node* node) const;

  ska::flat_hash_map<const Node*, size_t> parameter_of_;
  std::vector<char> reached_;

  // The last graph. Nodes are numbered breadth first; `leads_to_` holds, for each root and then for
  // each edge of node 0, 1, ..., the number of the node at its end.
  std::vector<Number> leads_to_;
  std::vector<Number> edges_;             // by node: the number of its edges
  std::vector<const Node*> accumulator_;  // by node: itself if it is a parameter's; else null
  // The nodes of the current graph, by number; members only to keep their memory.
  std::vector<Node*> nodes_;
  ska::flat_hash_map<const Node*, Number> numbers_;
};

}  // namespace ddp
