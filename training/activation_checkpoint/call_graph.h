// The graph that a checkpointed call makes.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>

namespace ddp {

/// Whether operations on this thread after the making of `node` made the tensor's graph; else it
/// has one of its own, or none.
bool has_graph_since(const torch::autograd::Node& node, const at::Tensor& tensor);

/// Takes a tensor out of its graph, which nothing refers to then, and makes it a result of `node`.
/// Changing it in place is an error if it is a view: the gradient of the tensor that it is a view
/// of would not know.
void move_to_node(const NodePtr& node, const at::Tensor& tensor);

/// The running means that batch normalizations in training mode have moved, in the graph of
/// `outputs` since `node` was made.
std::vector<at::Tensor> moved_statistics(
    const std::vector<at::Tensor>& outputs, const torch::autograd::Node& node);

/// Checks that every leaf of the graph of `outputs` is among `known`: otherwise its gradient would
/// be lost.
void check_leaves(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& known);

}  // namespace ddp
