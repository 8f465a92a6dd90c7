// Membership with what it ordered, for tests that say what happens to it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/membership/reform.h>

#include "launch/membership/membership.h"

namespace ddp::testing {

using namespace ddp::membership;
using namespace std::chrono_literals;
using launch::Membership;
using launch::MembershipLimits;
using launch::Remembered;

inline MembershipLimits limits_of(int ranks, int min_ranks) {
  MembershipLimits limits;
  limits.slots = limits.max_ranks = ranks;
  limits.min_ranks = min_ranks;
  return limits;
}

/// A machine, and the orders that it gave. Process n has id n + 1, connection n and pid 100 + n.
class Job {
 public:
  explicit Job(const MembershipLimits& limits, std::optional<Remembered> earlier = {})
      : machine_(limits, 0ms, std::move(earlier)) {}

  /// No launcher is there.
  void start_by_hand() { machine_.set_launched(false); }

  void say(int process, const MemberMessage& message) {
    machine_.on_message(now_, process, message);
    obey();
  }
  void hello(int process, int slot) {
    say(process, Hello{"t", static_cast<ProcessId>(process + 1), slot, 100 + process, "h"});
  }
  void enter(const std::vector<int>& processes) {
    for (const int process : processes) say(process, Met{form.generation});
    for (const int process : processes) say(process, Entered{form.generation});
  }
  void report(const std::vector<int>& processes, int64_t applied) {
    for (const int process : processes) {
      say(process, Report{gather.generation, applied, 0, Holding::Whole, form.generation});
    }
  }
  void begin(int ranks) {
    for (int process = 0; process < ranks; ++process) hello(process, process);
    for (int process = 0; process < ranks; ++process) say(process, Waits{});
    enter(all(ranks));
  }
  void close(int process) {
    machine_.on_closed(now_, process);
    obey();
  }
  /// Its connection ends, and it does not come back.
  void lose(int process, const std::vector<int>& others) {
    close(process);
    pass(2s, others);
  }
  void want_to_leave(int slot) {
    machine_.on_leave_wanted(now_, slot);
    obey();
  }
  /// It comes from another connection.
  void come_back(int process, int connection, int64_t generation, bool trains) {
    const auto id = static_cast<ProcessId>(process + 1);
    say(connection, Back{"t", id, process, 100 + process, "h", generation, trains});
  }
  void look_at_time() {
    machine_.on_time(now_);
    obey();
  }
  /// This process does not run.
  void stand_still(Membership::Time time) { now_ += time; }
  void die(int process) {
    machine_.on_exited(now_, process, 100 + process, "was killed");
    obey();
  }
  /// Time passes, while these processes show that they live.
  void pass(Membership::Time time, const std::vector<int>& alive) {
    const auto until = now_ + time;
    while (now_ < until) {
      now_ += 500ms;
      for (const int process : alive) say(process, Alive{});
      machine_.on_time(now_);
      obey();
    }
  }
  static std::vector<int> all(int ranks) {
    std::vector<int> processes;
    for (int process = 0; process < ranks; ++process) processes.push_back(process);
    return processes;
  }
  std::vector<int> slots() const {
    std::vector<int> slots;
    for (const Place& place : form.members) slots.push_back(place.slot);
    return slots;
  }

  Form form;      // the last one
  Gather gather;  // the last one
  You you;        // the last one
  End end;        // the last one
  int changes = 0;
  int forms = 0;
  int reforms = 0;
  std::vector<int> fenced, let_go, killed, closed, stores;  // connections, and pids
  std::optional<Membership::Finish> finish;
  bool again = false;
  Remembered remembered;

 private:
  void obey() {
    for (const auto& order : machine_.take_orders()) {
      if (const auto* send = std::get_if<Membership::Send>(&order)) {
        if (const auto* one = std::get_if<Form>(&send->message)) form = *one;
        if (const auto* one = std::get_if<Reform>(&send->message)) {
          if (const auto next = apply(*one, form)) form = *next;
        }
        forms += std::holds_alternative<Form>(send->message);
        reforms += std::holds_alternative<Reform>(send->message);
        if (const auto* one = std::get_if<Gather>(&send->message)) gather = *one;
        if (const auto* one = std::get_if<You>(&send->message)) you = *one;
        if (std::holds_alternative<Change>(send->message)) ++changes;
        if (std::holds_alternative<Store>(send->message)) stores.push_back(send->to);
        if (std::holds_alternative<Fenced>(send->message)) fenced.push_back(send->to);
        if (const auto* one = std::get_if<End>(&send->message)) {
          end = *one;
          let_go.push_back(send->to);
        }
      }
      if (const auto* one = std::get_if<Membership::Close>(&order)) {
        closed.push_back(one->connection);
      }
      if (const auto* one = std::get_if<Membership::Kill>(&order)) killed.push_back(one->pid);
      if (const auto* one = std::get_if<Membership::Finish>(&order)) finish = *one;
      if (const auto* one = std::get_if<Membership::Remember>(&order)) remembered = one->state;
      again = again || std::holds_alternative<Membership::StartAgain>(order);
    }
  }

  Membership machine_;
  Membership::Time now_{0};
};

}  // namespace ddp::testing
