// The coordinator of an elastic job, on a thread of the test.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#include "launch/elastic/carrier.h"

namespace ddp::testing {

class TestCoordinator {
 public:
  TestCoordinator(int max_ranks, int min_ranks)
      : carrier_(options_for(max_ranks, min_ranks), "t", /*port=*/0),
        thread_([this] { serve(); }) {}
  ~TestCoordinator() {
    ends_ = true;
    thread_.join();
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(carrier_.port()) + "/t"; }

 private:
  static launch::LaunchOptions options_for(int max_ranks, int min_ranks) {
    launch::LaunchOptions options;
    options.local_ranks = max_ranks;
    options.elastic.emplace();
    options.elastic->max_ranks = max_ranks;
    options.elastic->min_ranks = min_ranks;
    return options;
  }

  void serve() {
    while (!ends_) {
      std::vector<pollfd> waited;
      carrier_.add_to(waited);
      ::poll(waited.data(), waited.size(), /*timeout=*/10);
      carrier_.serve();
    }
    carrier_.finish_sending();
  }

  launch::Carrier carrier_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace ddp::testing
