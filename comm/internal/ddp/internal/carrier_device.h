#pragma once

#include <algorithm>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// Where the group can carry what lives in host memory: the CPU if it has a backend for it, else
/// its other device, as with NCCL alone (the current GPU then).
inline at::Device carrier_device(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  const auto is_cpu = [](const at::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::any_of(devices.begin(), devices.end(), is_cpu)) return at::kCPU;
  return devices.front();
}

}  // namespace ddp
