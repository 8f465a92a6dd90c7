// Ranks that are processes. Rank 0, which hosts the store, is stopped.
#include <string>

#include "support/processes.h"
#include "support/world.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr int kTimeoutMs = 8000;  // as in frozen_world.cpp
// Time for the second of an answer, and for the steps after a failure.
constexpr int kMoreMs = 10000;

/// A world of three ranks, started one by one.
struct FrozenWorld : World {
  explicit FrozenWorld(const char* what) : World({FROZEN_WORLD_PROGRAM, what}, 3) {}

  std::string store() const {
    return "the store, which rank 0 hosts at 127.0.0.1 port " + port() + ", did not answer for ";
  }
};

void check_ended_in_time(const Ended& end) {
  CAPTURE(end.out, end.err);
  CHECK(end.code == 0);
  CHECK(numbers_after(end.out, "after ").at(0) < kTimeoutMs + kMoreMs);
}

}  // namespace

TEST_CASE("a rank 0 that is frozen before the others connect is named", "[process][errors]") {
  FrozenWorld world("before");
  world.start(0).read_until("stops");
  for (const int rank : {1, 2}) world.start(rank);
  for (const int rank : {1, 2}) {
    const auto end = world.rank(rank).wait();
    check_ended_in_time(end);
    CHECK_THAT(
        end.out, ContainsText("init_process_group: expected rank 0 to answer at 127.0.0.1 port ") &&
                     ContainsText(
                         "but rank " + std::to_string(rank) +
                         " of 3 did not reach it: rank 0 took the connection and did not answer"));
  }
}

TEST_CASE("a rank 0 that freezes during the startup barrier is named", "[process][errors]") {
  FrozenWorld world("init");
  world.start(0);
  const auto end = world.start(1).wait();
  check_ended_in_time(end);
  CHECK_THAT(end.out, ContainsText("init_process_group on rank 1 of 3: " + world.store()));
}

TEST_CASE(
    "a frozen rank 0 is named by the ranks that call new_group or monitored_barrier",
    "[process][errors]") {
  const auto [what, subject, of_store] = GENERATE(table<const char*, const char*, const char*>(
      {{"new_group", "new_group failed on rank ", "; the store, which rank 0 hosts, has not answ"},
       {"barrier", "monitored_barrier on rank ", ": the store, which rank 0 hosts at 127.0.0.1"}}));
  FrozenWorld world(what);
  world.start_all();
  for (const int rank : {1, 2}) {
    const auto end = world.rank(rank).wait();
    check_ended_in_time(end);
    CHECK_THAT(
        end.out,
        ContainsText(subject + std::to_string(rank) + " of 3: ") && ContainsText(of_store));
  }
}

TEST_CASE("ranks end although rank 0 is frozen", "[process]") {
  FrozenWorld world("destroy");
  world.start_all();
  for (const int rank : {1, 2}) {
    const auto end = world.rank(rank).wait();
    check_ended_in_time(end);
    CHECK_THAT(end.out, ContainsText("no error"));
  }
}
