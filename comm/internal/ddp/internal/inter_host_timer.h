#pragma once

#include <optional>

namespace ddp {

/// Implemented by a backend that knows its time between hosts.
class InterHostTimer {
 public:
  virtual ~InterHostTimer() = default;
  /// The time in which at least one collective of this group was between hosts, in ms since the
  /// group was made; 0 on one host. Unset on a rank that sends nothing between hosts, while others
  /// of its host do.
  virtual std::optional<double> inter_host_ms() const = 0;
};

}  // namespace ddp
