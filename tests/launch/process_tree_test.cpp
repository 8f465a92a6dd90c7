#include "launch/processes/process_tree.h"
#include "launch/processes/rank_processes.h"

#include <csignal>
#include <system_error>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "support/catch.h"

using ddp::launch::DeathWatch;
using ddp::launch::reap;

TEST_CASE("a child's status is taken once it has ended", "[process]") {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(1);
  }
  CHECK_FALSE(reap(child, WNOHANG).has_value());
  ::kill(child, SIGKILL);
  CHECK(WTERMSIG(reap(child, 0).value()) == SIGKILL);
}

TEST_CASE("a process that is not a child has no status to take", "[process][errors]") {
  CHECK_THROWS_AS(reap(::getppid(), 0), std::system_error);
}

TEST_CASE(
    "the end of a process is reported once, although a forked process has copies of the watch",
    "[process]") {
  DeathWatch deaths;
  const pid_t first = ::fork();
  if (first == 0) {
    ::pause();
    ::_exit(0);
  }
  deaths.watch(first);
  const pid_t second = ::fork();  // keeps its copies open, as a rank that spawn() has just forked
  if (second == 0) {
    ::pause();
    ::_exit(0);
  }
  ::kill(first, SIGKILL);
  CHECK(reap(first, 0).has_value());
  CHECK(deaths.died() == std::vector<pid_t>{first});
  CHECK(deaths.died().empty());
  ::kill(second, SIGKILL);
  CHECK(reap(second, 0).has_value());
}
