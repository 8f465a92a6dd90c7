// A job without processes, for tests that say lines to it.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/job/job.h"

namespace ddp::testing {

using namespace std::chrono_literals;
using Lines = std::vector<std::string>;

/// A job with two ranks on each host, and what it said to each client.
class Told {
 public:
  explicit Told(int nodes, int restarts, int port = 0) : Told(options(nodes, restarts, port)) {}
  explicit Told(const launch::LaunchOptions& options) : job_(options, "t", wires(), 0ms) {}

  void say(int client, const std::string& line) { job_.on_line(now, client, line); }
  /// A launcher with HELD = 0.
  void join(int client, int node, const std::string& rest) {
    say(client, "host t 0 " + std::to_string(node) + " " + rest + " 0");
  }
  void lose(int client) { job_.on_closed(now, client); }
  void pass(std::chrono::milliseconds time) { job_.on_time(now += time); }
  /// The lines to a client since the last call.
  Lines to(int client) { return std::exchange(lines_[client], {}); }
  bool is_launcher(int client) const { return job_.is_launcher(client); }
  std::optional<int> exit_code() const { return job_.exit_code(); }
  std::optional<launch::Job::Time> next_time() const { return job_.next_time(); }

  std::chrono::milliseconds now{0};
  std::vector<int> closed;

  static launch::LaunchOptions options(int nodes, int restarts, int port) {
    launch::LaunchOptions options;
    options.nodes = nodes;
    options.local_ranks = 2;
    options.max_restarts = restarts;
    options.master_port = port;
    options.command = {"train"};
    return options;
  }

 private:
  launch::Job::Wires wires() {
    launch::Job::Wires wires;
    wires.send = [this](int client, const std::string& line) { lines_[client].push_back(line); };
    wires.close = [this](int client) { closed.push_back(client); };
    wires.watch = [](int) {};
    wires.remember = [](const launch::Remembered&) {};
    wires.new_port = [this] { return ++port_; };
    wires.reached_at = [](int) { return std::string(); };
    wires.say = [](const std::string&) {};
    return wires;
  }

  std::map<int, Lines> lines_;
  int port_ = 100;
  launch::Job job_;
};

}  // namespace ddp::testing
