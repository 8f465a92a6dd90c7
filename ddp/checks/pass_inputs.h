#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>

#include "replicas/hash_comparison.h"

namespace ddp {

/// Warns where all ranks got the same inputs in their first averaged passes: their loaders have no
/// DistributedSampler, and each rank repeats the others' work. Inputs that a rank got in each of
/// those passes, as benchmarks have, are no sign of it.
class PassInputs {
 public:
  /// \param enabled  the same on every rank.
  explicit PassInputs(bool enabled) : enabled_(enabled) {}

  /// The next pass counts as the first one.
  void restart();

  /// Whether note() needs the inputs of the coming forward pass.
  bool wants_inputs() const {
    return enabled_ && passes_ < kPasses && hashes_.size() < kMostHashes;
  }
  /// Notes a sample of the inputs of a forward pass.
  ///
  /// Cost: reads 32 KiB of each tensor; on an accelerator the host waits for it.
  void note(const std::vector<at::Tensor>& inputs);

  /// Call it once a pass, on every rank. In the last of the first passes, starts to compare.
  ///
  /// Collective: yes, in that pass. Blocks: no.
  void start(c10d::ProcessGroup& group, c10::Device device);
  /// Call it at the end of a pass. Warns on rank 0.
  void finish(GroupMonitor& monitor, c10d::ProcessGroup& group);

 private:
  static constexpr int kPasses = 3;
  // A step may accumulate, and a program may evaluate without a NoGradGuard.
  static constexpr size_t kMostHashes = 32;

  uint64_t digest(int rank) const;

  const bool enabled_;
  bool has_warned_ = false;
  int passes_ = 0;
  std::vector<uint64_t> hashes_;  // of each forward pass
  HashComparison comparison_;
};

}  // namespace ddp
