#pragma once

#include <chrono>
#include <functional>
#include <vector>

namespace ddp {

/// Aborts backends, all at the same time. After `at_most` the calls that still run go on alone: a
/// device's backend may block.
void call_aborts(std::vector<std::function<void()>> aborts, std::chrono::milliseconds at_most);

/// Waits for the aborts of this process that still run, on any thread. A device's driver that the
/// process ends under such a call ends the process by a signal.
void wait_for_aborts(std::chrono::milliseconds at_most);

}  // namespace ddp
