// Header only, so that benchmarks can use it without the examples.
#pragma once

#include <string>

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace examples {

/// Returns the device on which this rank trains: with a backend that has NCCL, the GPU that
/// init_process_group made current; else the CPU.
inline c10::Device rank_device(const std::string& backend) {
  if (backend.find("nccl") == std::string::npos) return c10::kCPU;
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

}  // namespace examples
