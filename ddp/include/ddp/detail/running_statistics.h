#pragma once

#include <ddp/export.h>
#include <ddp/process_group.h>

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

}  // namespace ddp::detail
