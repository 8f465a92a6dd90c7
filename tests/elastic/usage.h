// What a test's process has of the system's, which changes of an elastic job must not add to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ddp::testing {

/// What this process has of the system's.
struct Usage {
  int64_t descriptors = 0;
  int64_t threads = 0;
  int64_t mappings = 0;
  int64_t memory = 0;  // KiB
};

inline int64_t entries_of(const std::string& folder) {
  const auto begin = std::filesystem::directory_iterator(folder);
  return std::distance(begin, std::filesystem::directory_iterator());
}

inline Usage usage() {
  Usage now;
  now.descriptors = entries_of("/proc/self/fd");
  now.threads = entries_of("/proc/self/task");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++now.mappings;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> now.memory;
  }
  return now;
}

}  // namespace ddp::testing
