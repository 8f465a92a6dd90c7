// The calls with which the host waits for a GPU, counted.
#pragma once

#include <string>
#include <vector>

namespace ddp::testing {

/// From its construction on, on every thread of a program that is linked with host_waits.cpp: what
/// calls of the CUDA runtime LibTorch and this library made that wait for the device.
class HostWaits {
 public:
  HostWaits();
  /// Their names, in the order in which they came.
  std::vector<std::string> seen() const;

 private:
  size_t first_;
};

}  // namespace ddp::testing
