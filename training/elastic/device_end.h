#pragma once

#include <vector>

#include <c10/core/Device.h>
#include <ddp/process_group.h>

#include "elastic/part.h"

namespace ddp::elastic {

/// The end of a generation's collectives on the devices of its parts.
///
/// A stream waits for such a collective, and no thread. An abort ends it without a result, so the
/// host may have queued, or run, what uses a gradient that was never reduced. Before it counts what
/// a turn did, a rank therefore sends a number after all other collectives, and looks at the sum: a
/// communicator that was aborted gives none.
class DeviceEnd {
 public:
  /// Finds the devices of the parts, and those whose collectives a stream waits for.
  void find(const ProcessGroup& group, const std::vector<Part>& parts);
  bool is_none() const { return waited_for_.empty(); }
  /// All devices of the parts, also those for whose collectives the host waits.
  const std::vector<c10::Device>& devices() const { return devices_; }

  /// Waits until the collectives before it have ended on all ranks; nothing where there are none.
  ///
  /// \throws RankLost  one has been aborted.
  ///
  /// Collective: yes. Blocks: host. Cost: for each device a collective of 4 bytes.
  void wait(const ProcessGroup& group) const;

 private:
  std::vector<c10::Device> devices_;
  std::vector<c10::Device> waited_for_;
};

}  // namespace ddp::elastic
