#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace costs {

/// Times of one operation, in microseconds.
struct Times {
  std::vector<double> sorted;

  double quantile(double share) const {
    const auto last = static_cast<double>(sorted.size() - 1);
    return sorted[static_cast<size_t>(share * last + 0.5)];
  }
};

inline double microseconds_of(const std::function<void()>& operation) {
  const auto start = std::chrono::steady_clock::now();
  operation();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

/// The number of repetitions that fill the time, 3 to 2000; the caller broadcasts rank 0's.
inline int repetitions_for(double seconds, double us_of_one) {
  return static_cast<int>(std::clamp(seconds * 1e6 / std::max(us_of_one, 0.01), 3.0, 2000.0));
}

/// Runs the operation `repetitions` times, back to back.
inline Times repeat(int repetitions, const std::function<void()>& operation) {
  Times times;
  for (int i = 0; i < repetitions; ++i) times.sorted.push_back(microseconds_of(operation));
  std::sort(times.sorted.begin(), times.sorted.end());
  return times;
}

/// One line of JSON on standard output; report/growth.py reads it.
inline void print_line(const std::string& what, int ranks, int64_t bytes, const Times& times) {
  std::printf(
      "{\"what\": \"%s\", \"ranks\": %d, \"bytes\": %lld, \"us\": %.3f, \"us_p10\": %.3f, "
      "\"us_p90\": %.3f, \"repetitions\": %zu}\n",
      what.c_str(), ranks, static_cast<long long>(bytes), times.quantile(0.5), times.quantile(0.1),
      times.quantile(0.9), times.sorted.size());
  std::fflush(stdout);
}

}  // namespace costs
