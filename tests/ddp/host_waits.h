// Records the calls with which the host waits for a GPU.
#pragma once

#include <string>
#include <vector>

namespace ddp::testing {

/// Records which calls of the CUDA runtime that wait for the device LibTorch and this library make
/// after its construction, on every thread, in a program that is linked with host_waits.cpp.
class HostWaits {
 public:
  HostWaits();
  /// The names of the calls, in order.
  std::vector<std::string> seen() const;

 private:
  size_t first_;
};

}  // namespace ddp::testing
