#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sharded/sharded_model.h"

namespace ddp {

/// The gradients of which end of a unit's forward a node passes on.
enum class UnitEnd { Inputs, Outputs };

/// Tensors in place of `tensors` whose gradients pass through one node, which tells the unit's
/// model. Those that require no gradient stay as they are; if none does, there is no node.
///
/// The new tensors are detached aliases and no views, so that operations in place on them keep the
/// node.
std::vector<at::Tensor> pass_through_node(
    std::vector<at::Tensor> tensors, UnitEnd end, const std::shared_ptr<ShardedUnit>& unit,
    const ShardedModel::Place& place);

/// The forward passes of `model` in the graphs of tensors.
std::vector<std::shared_ptr<ForwardPass>> passes_of(
    const std::vector<at::Tensor>& tensors, const ShardedModel& model);

}  // namespace ddp
