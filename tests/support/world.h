#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "support/taken_port.h"

namespace ddp::testing {

/// Ranks without a launcher, because a launcher would end them. Rank 0 hosts the store.
class World {
 public:
  World(std::vector<std::string> command, int size, std::chrono::milliseconds timeout = kPatience)
      : command_(std::move(command)), size_(size), options_(within(timeout)) {}

  /// To be called in the order of the ranks.
  Process& start(int rank) {
    auto options = options_;
    // A test waits for one rank while others write: a full pipe would stop them. LibTorch's store
    // warns with a stack of 3 KB each time that it is called after its host ended.
    options.pipe_bytes = 1 << 20;  // the most that Linux allows by default
    const auto number = std::to_string(rank);
    options.environment = {"RANK=" + number,       "WORLD_SIZE=" + std::to_string(size_),
                           "LOCAL_RANK=" + number, "MASTER_ADDR=127.0.0.1",
                           "MASTER_PORT=" + port_, "OMP_NUM_THREADS=1"};
    return ranks_.emplace_back(command_, options);
  }
  void start_all() {
    for (int rank = 0; rank < size_; ++rank) start(rank);
  }

  int size() const { return size_; }
  Process& rank(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  /// The port of rank 0's store.
  const std::string& port() const { return port_; }

 private:
  const std::vector<std::string> command_;
  const int size_;
  const ProcessOptions options_;
  const std::string port_ = std::to_string(free_port());
  std::deque<Process> ranks_;
};

}  // namespace ddp::testing
