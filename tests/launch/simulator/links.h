// A large elastic job over links that take time: the coordinator's and the members' state machines,
// and a clock that goes from event to event.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "comm/membership/member.h"
#include "launch/membership/membership.h"

namespace ddp::testing {

struct Links {
  std::chrono::microseconds latency{500};  // one way
  int64_t bytes_per_us = 125;              // of the coordinator's host, each way; 0: any number
  std::chrono::microseconds line{10};      // of the coordinator's host for one, each way
};

/// Members that train, and pause, report and meet as soon as they are asked.
class LinkedJob {
 public:
  using Time = std::chrono::microseconds;

  LinkedJob(int ranks, const Links& links);

  /// Runs until all train in one generation, and returns how long that took.
  Time settle();
  /// Ends a process; the others' groups fail.
  void lose(int slot);
  void join(int slot);

  int64_t bytes_sent() const { return bytes_; }  // by the coordinator, since the last settle()
  /// How many peers the coordinator has passed for messages, and at most for a look at the time.
  int64_t visits() const { return machine_.peers().visits() - looked_at_; }
  int64_t most_looked_at() const { return most_looked_at_; }
  int members() const { return static_cast<int>(members_.size()); }
  int64_t generation() const { return machine_.generation(); }

 private:
  using Member = ddp::membership::Member;
  using Membership = ddp::launch::Membership;
  struct Event {
    Time at;
    int64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return std::make_pair(at, number) > std::make_pair(other.at, other.number);
    }
  };

  static ddp::launch::MembershipLimits limits_of(int ranks);
  std::chrono::milliseconds now() const;
  void after(Time delay, std::function<void()> run);
  void obey_machine();
  void obey_member(int connection);
  void act(int connection);
  bool all_train() const;
  /// When a line that is sent now through the coordinator's link is on the other side.
  Time crossed(Time& free_at, size_t bytes) const;

  const Links links_;
  const int rounds_to_meet_;  // of the ranks among themselves: log2
  Membership machine_;
  std::map<int, Member> members_;  // by connection
  int last_connection_ = 0;
  std::priority_queue<Event> events_;
  Time now_{0};
  Time out_free_{0}, in_free_{0};
  int64_t bytes_ = 0;
  int64_t looked_at_ = 0, most_looked_at_ = 0;
};

}  // namespace ddp::testing
