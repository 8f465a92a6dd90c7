#pragma once

#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Gives all ranks the state of rank `source`'s optimizer, by LibTorch's own serialization:
/// moments, momentum and step counts by the parameters' order, and the options of the parameter
/// groups.
///
/// Collective: yes, the same kind of optimizer on every rank. Blocks: host. Cost: two broadcasts,
///   of 8 bytes and of the serialized state.
void broadcast_optimizer(
    torch::optim::Optimizer& optimizer, int source, const ProcessGroup& group,
    GroupMonitor& monitor);

}  // namespace ddp
