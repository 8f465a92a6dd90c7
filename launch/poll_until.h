#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include <poll.h>

namespace ddp::launch {

/// Waits until one of the descriptors is ready, or `time` has come; without one, for a descriptor.
inline void poll_until(
    std::vector<pollfd>& waited, std::optional<std::chrono::steady_clock::time_point> time = {}) {
  using std::chrono::milliseconds;
  milliseconds timeout(-1);
  if (time) {
    const auto left = *time - std::chrono::steady_clock::now();
    timeout = std::max(std::chrono::ceil<milliseconds>(left), milliseconds(0));
  }
  ::poll(waited.data(), waited.size(), static_cast<int>(timeout.count()));
}

}  // namespace ddp::launch
