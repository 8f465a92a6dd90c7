// The coordinator of an elastic job, on a thread of the test.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>

#include <ddp/elastic.h>

#include "launch/job/coordinator.h"

namespace ddp::testing {

class TestCoordinator {
 public:
  /// \param port  0: a free one.
  /// \param state  a file from which another one goes on; "": none.
  TestCoordinator(int max_ranks, int min_ranks, int port = 0, const std::string& state = "")
      : coordinator_(std::in_place, options_for(max_ranks, min_ranks, state), "t", port),
        port_(coordinator_->port()),
        thread_([this] { serve(); }) {}
  ~TestCoordinator() { end(); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_) + "/t"; }

  /// Ends it as SIGKILL does.
  void kill() {
    is_killed_ = true;
    end();
    coordinator_.reset();
  }

 private:
  static launch::LaunchOptions options_for(int max_ranks, int min_ranks, const std::string& state) {
    launch::LaunchOptions options;
    options.local_ranks = max_ranks;
    options.elastic.emplace();
    options.elastic->max_ranks = max_ranks;
    options.elastic->min_ranks = min_ranks;
    options.elastic->state = state;
    return options;
  }

  void end() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
  }

  void serve() {
    while (!ends_) {
      std::vector<pollfd> waited;
      coordinator_->add_to(waited);
      ::poll(waited.data(), waited.size(), /*timeout=*/10);
      coordinator_->serve();
    }
    if (!is_killed_) coordinator_->finish_sending();
  }

  std::optional<launch::Coordinator> coordinator_;
  const int port_;
  std::atomic<bool> ends_{false};
  std::atomic<bool> is_killed_{false};
  std::thread thread_;
};

/// Options of a rank that is a thread: it keeps generators and the default group of the process.
inline ElasticOptions options_of_thread(
    const std::string& coordinator, const ProcessGroupOptions& group) {
  return ElasticOptions().coordinator(coordinator).seed(-1).sets_default_group(false).group(group);
}

}  // namespace ddp::testing
