#pragma once

#include <optional>
#include <string>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/group_monitor.h>

#include "monitor/job_monitor.h"

namespace ddp {

namespace monitor {

// How long a rank waits for a collective before it checks whether the group has failed, and between
// two such checks.
inline constexpr milliseconds kWaitSlice{500};
// When a waiting rank first reports where it waits, and probes its peers.
inline constexpr milliseconds kFirstReport{2000};

}  // namespace monitor

/// A wait that is late: on the host, after kWaitSlice.
class GroupMonitor::LateWait {
 public:
  /// \param waited  for how long it has lasted.
  LateWait(
      GroupMonitor& monitor, WaitPoint where, Peers peers, const c10d::Work* work,
      monitor::milliseconds waited = monitor::kWaitSlice);
  ~LateWait();
  C10_DISABLE_COPY_AND_ASSIGN(LateWait);

  /// Checks the group, the timeout and the peers, and reports where this rank waits.
  ///
  /// \param wait  as GroupMonitor::wait_until's: says whether what this rank waits for is over.
  /// \return whether it is over, where another rank has failed: that rank may have had its part
  ///         of it before, so that this rank can go on, too.
  /// \throws c10::DistBackendError  if waiting longer is useless.
  bool check_group(c10::function_ref<bool(monitor::milliseconds)> wait);

 private:
  GroupMonitor& monitor_;
  WaitPoint where_;
  const Peers peers_;
  const c10d::Work* const work_;
  const monitor::Clock::time_point begin_;
  monitor::milliseconds next_probe_;
  std::optional<uint64_t> reported_;  // the number in LateWaits
  std::string gone_;                  // the result of the last probe
};

}  // namespace ddp
