#pragma once

#include <ddp/export.h>

namespace ddp::detail {

/// Marks a module whose buffers autograd saves in training mode and does not read, as those of a
/// batch normalization: the wrapper may share them while a graph still needs to run backward.
class DDP_API HasRunningStatistics {
 protected:
  HasRunningStatistics() = default;
  HasRunningStatistics(const HasRunningStatistics&) = default;
  HasRunningStatistics& operator=(const HasRunningStatistics&) = default;
  virtual ~HasRunningStatistics() = default;
};

}  // namespace ddp::detail
