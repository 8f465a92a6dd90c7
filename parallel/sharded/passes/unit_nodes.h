#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>

#include "sharded/sharded_model.h"

namespace ddp {

/// The gradients of which end of a unit's forward a node passes on.
enum class UnitEnd { Inputs, Outputs };

/// A node that tells the model that backward has run all of a forward pass; the marker before all
/// others. Backward of other models comes after it.
NodePtr begin_marker(const std::shared_ptr<ShardedUnit>& root, const ShardedModel::Place& place);

/// A node that tells the model that backward gets to the end of a use. Autograd runs it in every
/// backward pass through a later use, also where the loss leaves this one out, when it has run what
/// forward made after it.
///
/// \param before  the marker of the use that forward left before this one; null for none.
///
/// The order is that of autograd's queue of a device: the nodes that forward made last run first.
/// torch::autograd::grad() runs no markers.
NodePtr exit_marker(
    const std::shared_ptr<ShardedUnit>& unit, const ShardedModel::Place& place,
    const NodePtr& before);

/// Tensors in place of `tensors` whose gradients pass through one node, which tells the unit's
/// model. Those that require no gradient stay as they are; if none does, there is no node.
///
/// The new tensors are detached aliases and no views, so that operations in place on them keep the
/// node.
///
/// \param marker  that autograd runs after the node; null for none.
std::vector<at::Tensor> pass_through_node(
    std::vector<at::Tensor> tensors, UnitEnd end, const std::shared_ptr<ShardedUnit>& unit,
    const ShardedModel::Place& place, const NodePtr& marker = nullptr);

/// The forward passes in the graphs of `roots`.
std::vector<std::shared_ptr<ForwardPass>> passes_of(const torch::autograd::edge_list& roots);
/// The forward passes of `model` in the graphs of tensors.
std::vector<std::shared_ptr<ForwardPass>> passes_of(
    const std::vector<at::Tensor>& tensors, const ShardedModel& model);

}  // namespace ddp
