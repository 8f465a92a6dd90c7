#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/group_monitor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "described_items.h"
#include "module_state.h"

namespace ddp {

/// A value that is to be the same on every rank.
struct ReplicaValue {
  DescribedItem item;  // of a tensor: its shape, its dtype and a hash of its bytes
  at::Tensor tensor;   // undefined for a number
};

/// The values of a module's parameters and buffers.
///
/// Cost: reads all bytes once; copies to the host what is elsewhere.
std::vector<ReplicaValue> replica_values(const std::vector<StateTensor>& state);

/// Of all bytes, in order; the same in every build.
///
/// Cost: as of a module.
uint64_t hash_of(const std::vector<at::Tensor>& tensors);

/// The options and the state of an optimizer, as optimizer_values.
///
/// Cost: as of a module.
std::vector<ReplicaValue> replica_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
    const Names& ignored);

/// Whose a model's buffers are at the moment.
enum class Buffers {
  Shared,  // of all ranks, so they are compared
  Own,     // a forward pass of this rank changed them, and its averaged backward pass is to come
};

/// How the ranks' values differ, in one line that is the same on every rank; "" where they do not.
///
/// \param buffers  where they are some rank's own, no buffers are compared.
/// \param refusal  why this rank has no values; the others learn it. Empty: it has.
/// \throws c10::ValueError  on every rank, where one refuses.
///
/// Collective: yes. Blocks: host. Cost: two all-gathers of a few bytes; where ranks differ, also
///   of every value's hash, and broadcasts of the tensors that are named.
std::string describe_replica_difference(
    const std::vector<ReplicaValue>& values, Buffers buffers, const std::exception_ptr& refusal,
    const ProcessGroup& group, GroupMonitor& monitor);

/// Compares a hash of tensors with every so many passes, beside their gradients.
class PeriodicReplicaCheck {
 public:
  explicit PeriodicReplicaCheck(int64_t every) : every_(every) {}

  /// Every pass, on every rank. Where it is due, sends a hash of what `find` returns.
  ///
  /// Collective: yes, where it is due. Blocks: no.
  void start(c10::function_ref<std::vector<at::Tensor>()> find, c10d::ProcessGroup& group);

  /// Whether the pass's hashes differ, the same on every rank; false where it was not due.
  bool differs(GroupMonitor& monitor);

 private:
  const int64_t every_;  // 0: never
  int64_t passes_ = 0;
  at::Tensor extremes_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp
