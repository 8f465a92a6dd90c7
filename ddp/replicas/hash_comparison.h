#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Compares a hash of each rank while the ranks go on.
class HashComparison {
 public:
  /// \param device  that the group has a backend for.
  ///
  /// Collective: yes. Blocks: no.
  void start(uint64_t hash, c10::Device device, c10d::ProcessGroup& group);

  /// Waits for the comparison.
  ///
  /// \param subject  of which the hashes are, for errors: "parameters".
  /// \return whether all ranks had the same hash; nothing where no comparison was started since.
  std::optional<bool> finish(const char* subject, GroupMonitor& monitor);

  /// Forgets one that was started.
  void drop() { work_.reset(); }

 private:
  at::Tensor extremes_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp
