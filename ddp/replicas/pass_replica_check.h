#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/internal/group_monitor.h>

#include "replicas/hash_comparison.h"

namespace ddp {

/// Compares a hash of the ranks' parameters in averaged passes: in the first one, and in every
/// `every`-th while the gradients are reduced.
class PassReplicaCheck {
 public:
  /// \param every  0: in no pass; unset: in the first pass alone.
  /// \param init_sync  of DistributedDataParallelOptions; without it, `every` has to be set for a
  ///         comparison in the first pass.
  PassReplicaCheck(std::optional<int64_t> every, bool init_sync)
      : every_(every), init_sync_(init_sync) {}

  /// The next pass counts as the first one.
  void restart();

  /// Call it at the begin of a pass, on every rank. In the first pass, compares the communication
  /// hooks, with which different ranks would hang, and the tensors that `find` returns.
  ///
  /// \throws c10::Error  on every rank, where the hooks differ.
  ///
  /// Collective: yes, in the first pass. Blocks: host.
  void compare_first(
      c10::function_ref<std::string()> describe_hook,
      c10::function_ref<std::vector<at::Tensor>()> find, const ProcessGroup& group,
      GroupMonitor& monitor);

  /// Call it once a pass, on every rank. In every `every`-th, starts to compare a hash of the
  /// tensors that `find` returns, and of what `hash_more` hashes.
  ///
  /// \param device  of the first of them.
  /// \throws c10::Error  while a graph is captured, also in a pass between.
  ///
  /// Collective: yes, in those passes. Blocks: no.
  void start(
      c10::Device device, c10::function_ref<std::vector<at::Tensor>()> find,
      c10::function_ref<uint64_t()> hash_more, c10d::ProcessGroup& group);

  /// Where a comparison of this pass found that the ranks' parameters differ.
  enum class Found {
    Nothing,
    InFirst,  // the next pass is compared as the first one again
    Later,
  };

  /// The pass's result, the same on every rank. Call it at the end of a pass.
  Found finish(GroupMonitor& monitor);
  /// Forgets a comparison that no finish() has read: the pass has another error.
  void drop() { comparison_.drop(); }

  /// This rank's hash in the last comparison.
  uint64_t hash() const { return hash_; }

 private:
  /// Pending until the comparison.
  enum class First { Pending, Equal, Different };

  const std::optional<int64_t> every_;
  const bool init_sync_;
  First first_ = First::Pending;
  int64_t passes_ = 0;
  uint64_t hash_ = 0;
  HashComparison comparison_;
};

}  // namespace ddp
