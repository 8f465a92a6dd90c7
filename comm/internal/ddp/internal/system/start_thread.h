#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace ddp {

/// Starts a thread, as std::thread does.
///
/// \throws std::system_error  that says what to do, where a limit allows no further thread.
template <typename Body>
std::thread start_thread(Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw std::system_error(
        error.code(),
        "threads: expected to start one more, which a limit does not allow. Raise `ulimit -u`, or "
        "pids.max of the container");
  }
}

}  // namespace ddp
