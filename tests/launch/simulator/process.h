// The processes of a simulated job, and the clock and the chance that all parts of it share.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/membership/member.h"

namespace ddp::testing {

using namespace ddp::membership;
using Time = std::chrono::milliseconds;

constexpr Time kTick(50);
constexpr int64_t kReportTicks = 100;  // the limit of a report, and of a group's wait

/// A rule did not hold.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void expect(bool holds, const std::string& rule) {
  if (!holds) throw Broken(rule);
}

/// One sequence of draws: a seed gives the same schedule again.
struct Chance {
  explicit Chance(uint64_t seed) : random(seed) {}

  Time now() const { return kTick * tick; }
  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
  bool once_in(int64_t n) { return below(n) == 0; }
  /// When a message that is sent now arrives.
  int64_t later() { return tick + 1 + below(4); }

  std::mt19937_64 random;
  int64_t tick = 0;
};

template <typename Message>
using Queue = std::deque<std::pair<int64_t, Message>>;  // with the tick of arrival

struct Process {
  int pid = 0;
  int slot = 0;
  int host = 0;
  std::optional<Member> member;
  int64_t stopped_until = 0;
  int64_t hangs_until = 0;
  // of Network
  int connection = 0;  // 0: none
  bool wants_connection = false;
  int64_t connects_at = 0;
  int64_t broke_at = 0;
  int breaks = 0;           // in a row
  bool close_seen = false;  // the coordinator closed, and the member does not know
  Queue<CoordinatorMessage> inbox;
  // of Training
  int64_t stuck_since = 0;
  Holding holding = Holding::None;
  int64_t applied = 0;
  uint64_t state = 1;  // a hash of all steps
  int late_steps = 0;  // applied after a newer generation trained
};

using Processes = std::map<int, Process>;  // by pid

}  // namespace ddp::testing
