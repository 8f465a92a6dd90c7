#pragma once

#include <functional>
#include <string>

#include "monitor/device/device_works.h"
#include "monitor/waits/late_wait.h"

namespace ddp {

/// A collective on a device that has not ended for longer than kWaitSlice.
struct GroupMonitor::DeviceWait {
  DeviceWait(GroupMonitor& monitor, const DeviceWorks::Entry& entry);

  const uint64_t number;
  const CollectiveCall call;
  const std::function<std::string()> where;
  LateWait late;
};

}  // namespace ddp
