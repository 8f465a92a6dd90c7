// Ranks that are processes. Rank 0, which hosts the store, is stopped.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <string>

#include "support/processes.h"

#include "support/catch.h"

using ddp::testing::Ended;
using ddp::testing::numbers_after;
using ddp::testing::Process;
using ddp::testing::ProcessOptions;

namespace {

constexpr int kTimeoutMs = 4000;  // as in frozen_world.cpp
// Time for the second of an answer, and for the steps after a failure.
constexpr int kMoreMs = 5000;

/// A port of this host that nothing listens on.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(fd, generic, length) == 0);
  REQUIRE(getsockname(fd, generic, &length) == 0);
  close(fd);
  return ntohs(address.sin_port);
}

/// A world of three ranks, started one by one.
class FrozenWorld {
 public:
  explicit FrozenWorld(const char* what) : what_(what) {}

  Process& start(int rank) {
    const auto text = std::to_string(rank);
    ProcessOptions options;
    options.environment = {"RANK=" + text, "WORLD_SIZE=3", "LOCAL_RANK=" + text};
    return ranks_.emplace_back(
        std::vector<std::string>{FROZEN_WORLD_PROGRAM, what_, port_}, options);
  }

  Process& rank(int rank) { return ranks_[static_cast<size_t>(rank)]; }

  std::string store() const {
    return "the store, which rank 0 hosts at 127.0.0.1 port " + port_ + ", did not answer for ";
  }

 private:
  const std::string what_;
  const std::string port_ = std::to_string(free_port());
  std::deque<Process> ranks_;
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
                         " of 3 did not reach it: "
                         "rank 0 took the connection and did not answer"));
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
  for (int rank = 0; rank < 3; ++rank) world.start(rank);
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
  for (int rank = 0; rank < 3; ++rank) world.start(rank);
  for (const int rank : {1, 2}) {
    const auto end = world.rank(rank).wait();
    check_ended_in_time(end);
    CHECK_THAT(end.out, ContainsText("no error"));
  }
}
