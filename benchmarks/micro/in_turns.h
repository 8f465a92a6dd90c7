// Measures several ways to do the same thing, in turns.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../median.h"

namespace benchmarks {

struct Way {
  std::string name;
  std::function<double()> run;      // runs it once; returns the time
  std::vector<double> times = {};   // of the counted rounds
  std::vector<double> ratios = {};  // to the first way's time, round by round
};

template <typename Body>
double milliseconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

/// Runs every way once a round; the first `warm_up` rounds do not count.
///
/// Every second round runs in the opposite order, because the data that one way leaves in the
/// caches helps the next. Ratios are taken within a round, because the speed of a machine drifts.
inline void run_in_turns(std::vector<Way>& ways, int warm_up, int rounds) {
  std::vector<double> now(ways.size());
  for (int round = -warm_up; round < rounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const auto which = round % 2 == 0 ? i : ways.size() - 1 - i;
      now[which] = ways[which].run();
    }
    if (round < 0) continue;
    for (size_t i = 0; i < ways.size(); ++i) {
      ways[i].times.push_back(now[i]);
      ways[i].ratios.push_back(now[i] / now[0]);
    }
  }
}

/// Prints a row for each way: the medians of its times and of its ratios.
inline void print_ways(
    const std::string& title, const std::string& unit, const std::vector<Way>& ways) {
  std::printf("%-34s %12s %10s\n", title.c_str(), unit.c_str(), "ratio");
  for (const auto& way : ways) {
    std::printf("%-34s %12.3f %10.3f\n", way.name.c_str(), median(way.times), median(way.ratios));
  }
}

}  // namespace benchmarks
