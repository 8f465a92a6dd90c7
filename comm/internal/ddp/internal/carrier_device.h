#pragma once

#include <algorithm>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// The device on which the group can send data from host memory: the CPU if the group has a backend
/// for it, else its other device, as with NCCL alone (then the current GPU).
inline at::Device carrier_device(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  const auto is_cpu = [](const at::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::any_of(devices.begin(), devices.end(), is_cpu)) return at::kCPU;
  return devices.front();
}

}  // namespace ddp
