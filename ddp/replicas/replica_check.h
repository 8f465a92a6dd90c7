#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "replicas/model_description.h"
#include "wrapper/model_tensors.h"

namespace ddp {

/// A value that has to be the same on every rank.
struct ReplicaValue {
  DescribedItem item;  // for a tensor: its shape, its dtype and a hash of its bytes
  at::Tensor tensor;   // undefined for a number
};

/// The values of a module's parameters and buffers.
///
/// Cost: reads all bytes once; copies tensors of other devices to the host.
std::vector<ReplicaValue> replica_values(const std::vector<StateTensor>& state);

/// A hash of all bytes, in order; the same in every build.
///
/// Cost: as for a module.
uint64_t hash_of(const std::vector<at::Tensor>& tensors);

/// The options and the state of an optimizer, by names that do not depend on the rank.
///
/// \param module  gives the parameters' names.
/// \param ignored  parameters whose state is left out.
///
/// Cost: as for a module.
std::vector<ReplicaValue> replica_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
    const Names& ignored);

/// Whether this rank's buffers should equal the other ranks' now.
enum class Buffers {
  Shared,  // they should, so they are compared
  Own,     // a forward pass may have changed them since they were last shared
};

/// How the ranks' values differ, in one line that is the same on every rank; "" where they do not.
///
/// \param buffers  if Own on some rank, no rank compares buffers.
/// \param error  why this rank has no values; null: it has some. All ranks throw it.
/// \throws c10::ValueError  on every rank, where one has an error.
///
/// Collective: yes. Blocks: host. Cost: two all-gathers of a few bytes; where ranks differ, also
///   of every value's hash, and broadcasts of the tensors that are named.
std::string describe_replica_difference(
    const std::vector<ReplicaValue>& values, Buffers buffers, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor);

}  // namespace ddp
