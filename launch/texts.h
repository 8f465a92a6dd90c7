#pragma once

#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

#include <ddp/internal/text.h>

namespace ddp::launch {

/// "2.5 s".
inline std::string seconds_text(std::chrono::milliseconds duration) {
  return formatted("%.1f s", static_cast<double>(duration.count()) / 1000);
}

/// "1 rank", "2 ranks".
inline std::string count_of(int n, const std::string& noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

/// "rank 1 (pid 13)".
inline std::string rank_with_pid(int rank, int pid) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
}

/// After a call of the operating system that has failed.
[[noreturn]] inline void throw_errno(const std::string& text) {
  throw std::system_error(errno, std::generic_category(), text);
}

}  // namespace ddp::launch
