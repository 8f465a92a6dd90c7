#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ddp/checkpointer.h>
#include <ddp/preemption_notice.h>

#include "progress.h"

namespace examples {

/// Implements --leave-on-signal: once a rank got a signal, all save in the same step and end with
/// the same code; --resume goes on there.
class LeaveOnSignal {
 public:
  /// \param wanted  whether --leave-on-signal was given; if not, signals end ranks as ever.
  explicit LeaveOnSignal(bool wanted) {
    if (wanted) notice_.emplace();
  }

  /// Called after each step. Does not return where the ranks leave.
  ///
  /// \param checkpointer  of --checkpoint, without which there is no --leave-on-signal.
  /// \param number  of the checkpoint.
  /// \param place   for the line that says so: "step 12".
  ///
  /// Collective: yes, on the default group.
  void check(
      std::optional<ddp::Checkpointer>& checkpointer, int64_t number, const std::string& place,
      Progress& progress);

 private:
  std::optional<ddp::PreemptionNotice> notice_;
};

}  // namespace examples
