// An elastic job of one host and two ranks by its lines, without processes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/job/job.h"
#include "launch/membership_job.h"

namespace ddp::testing {

/// The launcher is client 9; rank r is client r, and has pid 100 + r.
class LaunchedJob {
 public:
  using Remember = std::function<void(const Remembered&)>;
  explicit LaunchedJob(Remember remember = [](const Remembered&) {})
      : job_(options(), "t", wires(std::move(remember)), 0ms) {}

  void say(Membership::Time now, int client, const std::string& line) {
    job_.on_line(now, client, line);
  }
  /// Until both ranks train.
  void begin() {
    say(0ms, 9, "host t 1 0 1 2 10 0");
    for (const int rank : {0, 1}) {
      say(0ms, 9, "started " + std::to_string(rank) + " " + std::to_string(100 + rank));
      const auto id = static_cast<ProcessId>(rank + 1);
      say(0ms, rank, line_of(MemberMessage(Hello{"t", id, rank, 100 + rank, "h"})));
      say(0ms, rank, "waits");
    }
    for (const char* line : {"met 1", "entered 1"}) {
      for (const int rank : {0, 1}) say(0ms, rank, line);
    }
  }
  std::optional<int> exit_code() const { return job_.exit_code(); }

  std::vector<std::string> told;  // the launcher

 private:
  static launch::LaunchOptions options() {
    launch::LaunchOptions options;
    options.local_ranks = 2;
    options.max_restarts = 10;
    options.command = {"train"};
    options.elastic.emplace();
    options.elastic->max_ranks = 2;
    options.elastic->min_ranks = 1;
    return options;
  }
  launch::Job::Wires wires(Remember remember) {
    launch::Job::Wires wires;
    wires.send = [this](int client, const std::string& line) {
      if (client == 9) told.push_back(line);
    };
    wires.close = wires.watch = [](int) {};
    wires.remember = std::move(remember);
    wires.new_port = [] { return 1; };
    wires.say = [](const std::string&) {};
    wires.reached_at = [](int) { return std::string("127.0.0.1"); };
    return wires;
  }

  launch::Job job_;
};

}  // namespace ddp::testing
