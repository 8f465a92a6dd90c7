#include "launch/processes/process_tree.h"

#include <csignal>
#include <system_error>

#include <sys/wait.h>
#include <unistd.h>

#include "support/catch.h"

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
