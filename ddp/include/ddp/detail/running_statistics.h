#pragma once

#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp::detail {

/// Marks a module whose buffers autograd saves in training mode and does not read, as those of a
/// batch normalization: the wrapper may share them while a graph still needs to run backward.
class DDP_API HasRunningStatistics {
 public:
  /// The group in which its forward and backward communicate in training; null for none.
  virtual ProcessGroup statistics_group() const { return nullptr; }

 protected:
  HasRunningStatistics() = default;
  HasRunningStatistics(const HasRunningStatistics&) = default;
  HasRunningStatistics& operator=(const HasRunningStatistics&) = default;
  virtual ~HasRunningStatistics() = default;
};

/// Whether the module's own buffers are running statistics that neither its forward nor its
/// backward reads: those of a batch normalization in training mode. In evaluation mode both read
/// them.
DDP_API bool has_running_statistics(const torch::nn::Module& owner);

}  // namespace ddp::detail
