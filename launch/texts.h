#pragma once

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <ddp/internal/fork_ranks.h>  // kMaxLocalRanks
#include <ddp/internal/text.h>

namespace ddp::launch {

constexpr int kMaxNodes = 65536;

/// "2.5 s".
inline std::string seconds_text(std::chrono::milliseconds duration) {
  return formatted("%.1f s", static_cast<double>(duration.count()) / 1000);
}

/// "1 rank", "2 ranks".
inline std::string count_of(int n, const std::string& noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

/// "5 minutes", "90 s".
inline std::string in_words(std::chrono::seconds time) {
  const auto seconds = time.count();
  const bool whole = seconds >= 60 && seconds % 60 == 0;
  return whole ? count_of(static_cast<int>(seconds / 60), "minute")
               : std::to_string(seconds) + " s";
}

/// "rank 1 (pid 13)".
inline std::string rank_with_pid(int rank, int pid) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
}

/// After a call of the operating system that has failed.
[[noreturn]] inline void throw_errno(const std::string& text) {
  throw std::system_error(errno, std::generic_category(), text);
}

/// Reads a decimal integer in [low, high]: no signs, no fractions, no overflow.
inline std::optional<int> number_in(const std::string& text, int low, int high) {
  int value = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool is_number = error == std::errc() && stop == end && low <= value && value <= high;
  return is_number ? std::optional<int>(value) : std::nullopt;
}

/// Splits at each separator: {"a", "", "b"} for "a,,b".
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char one : text) {
    if (one == separator) {
      parts.emplace_back();
    } else {
      parts.back() += one;
    }
  }
  return parts;
}

/// An IPv6 address without its brackets, and any other host as it is.
inline std::string without_brackets(const std::string& host) {
  const bool has = host.size() > 1 && host.front() == '[' && host.back() == ']';
  return has ? host.substr(1, host.size() - 2) : host;
}

}  // namespace ddp::launch
