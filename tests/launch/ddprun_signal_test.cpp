// How ddprun reacts to signals.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "launch/processes/signals.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

const std::string kEndsAtFirst = "exec " SIGNAL_PROBE " 1 0";
const std::string kGoesOn = "exec " SIGNAL_PROBE " 1000 0";

void check_gone(const std::vector<int>& pids) {
  for (const int pid : pids) {
    CAPTURE(pid);
    CHECK(is_gone(pid));
  }
}

}  // namespace

TEST_CASE("a signal reaches every rank and decides the exit code", "[process]") {
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP, SIGQUIT);
  const std::string name = ddp::launch::signal_name(signal);
  Process job(ddprun_sh({"-n", "2"}, kEndsAtFirst));
  job.read_until("pid ", 2);
  job.send(signal);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + signal);
  CHECK_THAT(
      ended.out, ContainsText("[0] got " + name + "\n") && ContainsText("[1] got " + name + "\n"));
  CHECK(ended.err == "ddprun: got " + name + "; passing it on to 2 ranks\n");
  check_gone(numbers_after(ended.out, "pid "));
}

TEST_CASE("a signal reaches the children of a rank, each once", "[process]") {
  // One child in the rank's group, one outside of it, and one outside that has lost its parent.
  const std::string probe = SIGNAL_PROBE " 1000 0 & ";
  Process job(ddprun_sh(
      {"-n", "1"}, "trap : TERM; " + probe + "setsid " + probe + "(setsid " + probe +
                       "); while :; do wait; done"));
  job.read_until("pid ", 3);
  job.send(SIGTERM);
  job.read_until("got SIGTERM", 3);
  job.send(SIGINT);
  const Ended ended = job.wait();
  CHECK(sorted_lines(ended.out).size() == 3 + 3);
  check_gone(numbers_after(ended.out, "pid "));
}

TEST_CASE("ranks that ignore a signal are killed after the grace period", "[process]") {
  Process job(ddprun_sh({"-n", "2", "--grace", "0.3"}, kGoesOn));
  job.read_until("pid ", 2);
  job.send(SIGTERM);
  const auto start = Clock::now();
  const Ended ended = job.wait();
  CHECK(Clock::now() - start < 20s);
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(ended.err, ContainsText("the grace period is over; killing rank 0 (pid "));
  check_gone(numbers_after(ended.out, "pid "));
}

TEST_CASE("a second SIGINT kills at once, a second SIGTERM does not", "[process]") {
  Process job(ddprun_sh({"-n", "2", "--grace", "1000"}, kGoesOn), in_one_stream());
  job.read_until("pid ", 2);
  const int first = GENERATE(SIGINT, SIGTERM);
  job.send(first);
  job.read_until("ddprun: got ");
  job.send(SIGTERM);
  const auto pids = numbers_after(job.out(), "pid ");
  CHECK_FALSE(eventually([&] { return is_gone(pids[0]); }, 100ms));
  job.send(SIGINT);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + first);
  CHECK_THAT(ended.out, ContainsText("got SIGINT while ending; killing rank 0 (pid "));
  check_gone(pids);
}

TEST_CASE("SIGUSR1 and SIGUSR2 reach every rank and end nothing", "[process]") {
  const int signal = GENERATE(SIGUSR1, SIGUSR2);
  const std::string name = ddp::launch::signal_name(signal);
  // Without a grace period, an ending job would kill the ranks. Each ends at its second signal.
  Process job(ddprun_sh({"-n", "2", "--grace", "0"}, "exec " SIGNAL_PROBE " 2 0"));
  job.read_until("pid ", 2);
  job.send(signal);
  job.read_until("got " + name, 2);
  const auto pids = numbers_after(job.out(), "pid ");
  CHECK_FALSE(eventually([&] { return is_gone(pids[0]) || is_gone(pids[1]); }, 100ms));
  job.send(signal);
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  const std::string line = "ddprun: got " + name + "; passing it on to 2 ranks\n";
  CHECK(ended.err == line + line);
}

TEST_CASE("ranks that leave after SIGUSR1 are not started again", "[process]") {
  // Each has its own way to end: the first one that ends does not take the other's time.
  const TemporaryFolder folder;
  const std::string first = folder.file("first");
  Process job(
      ddprun_sh(
          {"-n", "2", "--max-restarts", "3", "--grace", "1000"},
          "trap 'left=1' USR1; echo ready; until [ \"$left\" ]; do sleep 0.01; done; "
          "if [ $RANK = 1 ]; then touch " +
              first + "; else until [ -e " + first +
              " ]; do sleep 0.01; done; echo saved; fi; exit 143"),
      in_one_stream());
  job.read_until("ready", 2);
  job.send(SIGUSR1);
  const Ended ended = job.wait();
  INFO(ended.out);
  CHECK(ended.code == 143);
  CHECK_THAT(
      ended.out, ContainsText("exited with code 143; the job leaves and is not started again"));
  CHECK_THAT(ended.out, ContainsText("[0] saved") && !ContainsText("restart"));
}

TEST_CASE("SIGUSR1 does not cut off output that is still to be written", "[process]") {
  // More bytes than this test's pipe holds, and fewer than make ddprun stop reading the rank.
  Process job(ddprun_sh({"-n", "1"}, "echo pid $$; head -c 500000 /dev/zero"));
  job.read_until("pid ");
  const int rank = numbers_after(job.out(), "pid ").at(0);
  REQUIRE(eventually([&] { return is_gone(rank); }));
  job.send(SIGUSR1);
  CHECK_FALSE(eventually([&] { return is_gone(job.pid()); }, 100ms));
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  CHECK(std::count(ended.out.begin(), ended.out.end(), '\0') == 500000);
}

TEST_CASE("ranks that SIGUSR1 kills, for want of a handler, leave", "[process]") {
  Process job(ddprun_sh({"-n", "2", "--max-restarts", "3"}, "echo pid $$; exec sleep 1000"));
  job.read_until("pid ", 2);
  job.send(SIGUSR1);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(
      ended.err,
      ContainsText("was killed by signal 10 (SIGUSR1); the job leaves and is not started "
                   "again") &&
          !ContainsText("restart 1"));
  check_gone(numbers_after(ended.out, "pid "));
}

TEST_CASE("ddprun and its ranks ignore the signals that the caller ignores", "[process]") {
  ProcessOptions ignoring;
  ignoring.ignored_signals = {SIGUSR1, SIGUSR2};
  Process job(ddprun_sh({"-n", "1"}, "grep SigIgn /proc/self/status; " + kEndsAtFirst), ignoring);
  job.read_until("pid ");
  job.send(SIGUSR1);
  job.send(SIGUSR2);
  job.send(SIGTERM);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(ended.out, ContainsText("0000000000000a00") && ContainsText("got SIGTERM"));
  CHECK(ended.err == "ddprun: got SIGTERM; passing it on to 1 rank\n");
}

TEST_CASE("nohup makes ddprun and its ranks ignore a hangup", "[process]") {
  ProcessOptions nohup;
  nohup.ignored_signals = {SIGHUP};
  Process job(ddprun_sh({"-n", "1"}, "grep SigIgn /proc/self/status; " + kEndsAtFirst), nohup);
  job.read_until("pid ");
  job.send(SIGHUP);
  job.send(SIGTERM);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(ended.out, ContainsText("0000000000000001"));
  CHECK(ended.err == "ddprun: got SIGTERM; passing it on to 1 rank\n");
}
