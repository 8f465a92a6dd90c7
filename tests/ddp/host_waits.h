// Records the calls with which the host waits for a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
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
  /// How often this thread has asked the device whether an event or a stream had ended, and it had
  /// not. Who polls asks thousands of times a second; LibTorch's allocators ask now and then, too.
  int64_t polls() const;

 private:
  size_t first_;
  int64_t first_poll_;
};

}  // namespace ddp::testing
