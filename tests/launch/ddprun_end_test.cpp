// How a job ends, and that none of its processes remains.
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "support/processes.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

/// Waits for the end of a job; fails the test when a process whose id the job printed still runs.
Ended wait_without_orphans(Process& job) {
  const Ended ended = job.wait();
  for (const int pid : numbers_after(ended.out, "pid ")) {
    CAPTURE(pid);
    CHECK(is_gone(pid));
  }
  return ended;
}

/// Checks that processes end by themselves; does not leave them running when they do not.
void check_end(const std::vector<int>& pids) {
  for (const int pid : pids) {
    CAPTURE(pid);
    const bool gone = eventually([&] { return is_gone(pid); }, 30s);
    CHECK(gone);
    if (!gone) ::kill(pid, SIGKILL);
  }
}

/// Returns the text that a rank printed after "pid ".
std::string pid_of(const std::string& out, int rank) {
  const auto line = out.find("[" + std::to_string(rank) + "] ");
  return std::to_string(numbers_after(out.substr(line), "pid ").at(0));
}

}  // namespace

TEST_CASE("a job succeeds when every rank does, early or late", "[process]") {
  Process job(ddprun_sh({"-n", "2"}, "[ $RANK = 0 ] && exit 0; read -r x; echo late"));
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  CHECK(ended.out == "[1] late\n");
  CHECK(ended.err.empty());
}

TEST_CASE("a job whose last rank is stopped ends after the grace period", "[process]") {
  Process job(ddprun_sh(
      {"-n", "2", "--grace", "0.2"}, "[ $RANK = 0 ] && exit 0; echo pid $$; kill -STOP $$"));
  const Ended ended = wait_without_orphans(job);
  const auto rank = "rank 1 (pid " + pid_of(ended.out, 1) + ")";
  CHECK(ended.code == 128 + SIGKILL);
  CHECK_THAT(
      ended.err, ContainsText("ddprun: " + rank + " was stopped by signal 19 (SIGSTOP)\n") &&
                     ContainsText("ddprun: all other ranks have ended; killing " + rank));
}

TEST_CASE("a stopped rank may continue", "[process]") {
  Process job(
      ddprun_sh({"-n", "2"}, "[ $RANK = 0 ] && exit 0; echo pid $$; kill -STOP $$; echo awake"),
      in_one_stream());
  job.read_until("was stopped");
  ::kill(numbers_after(job.out(), "[1] pid ").at(0), SIGCONT);
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsText("[1] awake"));
}

TEST_CASE("ranks' exit codes are reported even if the caller ignores SIGCHLD", "[process]") {
  ProcessOptions ignoring;
  ignoring.ignored_signals = {SIGCHLD};
  const Ended job = run(ddprun_sh({"-n", "2"}, "exit $((3 * RANK))"), ignoring);
  CHECK(job.code == 3);
  CHECK_THAT(job.err, ContainsText("ddprun: rank 1 (pid ") && ContainsText("exited with code 3"));
}

TEST_CASE("a rank that fails is named with its code and ends the others", "[process]") {
  Process job(ddprun_sh(
      {"-n", "3", "--grace", "1000"}, "echo pid $$; [ $RANK = 1 ] && exit 3; exec sleep 1000"));
  const auto start = Clock::now();
  const Ended ended = wait_without_orphans(job);
  CHECK(Clock::now() - start < 30s);  // does not wait for the whole grace period
  CHECK(ended.code == 3);
  CHECK(
      ended.err == "ddprun: rank 1 (pid " + pid_of(ended.out, 1) +
                       ") exited with code 3; ending the other 2 ranks\n");
}

TEST_CASE("a rank that a signal kills is named with the signal", "[process]") {
  Process job(
      ddprun_sh({"-n", "2"}, "echo pid $$; [ $RANK = 1 ] && kill -KILL $$; exec sleep 1000"));
  const Ended ended = wait_without_orphans(job);
  CHECK(ended.code == 128 + SIGKILL);
  CHECK(
      ended.err == "ddprun: rank 1 (pid " + pid_of(ended.out, 1) +
                       ") was killed by signal 9 (SIGKILL); ending the other 1 rank\n");
}

TEST_CASE("a failed rank's last output comes before the report of its failure", "[process]") {
  const Ended job =
      run(ddprun_sh({"-n", "1"}, "echo said; echo complained >&2; printf 'last words'; exit 4"),
          in_one_stream());
  CHECK(job.code == 4);
  const auto report = job.out.find("ddprun: rank 0");
  REQUIRE(report != std::string::npos);
  for (const char* words : {"[0] said\n", "[0] complained\n", "[0] last words\n"}) {
    CHECK(job.out.find(words) < report);
  }
}

TEST_CASE("the other ranks may end by themselves within the grace period", "[process]") {
  Process job(ddprun_sh({"-n", "2"}, "exec " SIGNAL_PROBE " 1 $((3 * RANK))"));
  job.read_until("pid ", 2);
  REQUIRE(::kill(std::stoi(pid_of(job.out(), 1)), SIGUSR1) == 0);
  const Ended ended = wait_without_orphans(job);
  CHECK(ended.code == 3);
  CHECK_THAT(ended.out, ContainsText("[0] got SIGTERM\n"));
  CHECK_THAT(ended.err, !ContainsText("grace"));
}

TEST_CASE("a rank that ignores SIGTERM is killed after the grace period", "[process]") {
  const auto grace = GENERATE(
      std::vector<std::string>{"-n", "2"}, std::vector<std::string>{"-n", "2", "--grace", "0.3"});
  Process job(ddprun_sh(grace, "exec " SIGNAL_PROBE " $((RANK ? 1 : 1000)) 9"));
  job.read_until("pid ", 2);
  const auto start = Clock::now();
  REQUIRE(::kill(std::stoi(pid_of(job.out(), 1)), SIGUSR1) == 0);
  const Ended ended = wait_without_orphans(job);
  const auto took = Clock::now() - start;
  CHECK(took > (grace.size() == 2 ? 2900ms : 290ms));
  CHECK(took < 20s);
  CHECK(ended.code == 9);
  CHECK_THAT(
      ended.err,
      ContainsText(
          "ddprun: the grace period is over; killing rank 0 (pid " + pid_of(ended.out, 0) + ")"));
}

TEST_CASE("the rank that failed first is reported, though others failed too", "[process]") {
  // Rank 1 fails, and rank 0 because of it, all while ddprun is stopped: then it finds both dead,
  // and without the order of deaths, rank 0, the older process, would come first.
  Process job(ddprun_sh({"-n", "2"}, "exec " SIGNAL_PROBE " 1 $((10 + RANK))"));
  job.read_until("pid ", 2);
  const std::string rank_0 = pid_of(job.out(), 0);
  const std::string rank_1 = pid_of(job.out(), 1);
  const int supervisor = numbers_after(job.out(), "parent ").at(0);
  REQUIRE(::kill(supervisor, SIGSTOP) == 0);
  for (const int pid : {std::stoi(rank_1), std::stoi(rank_0)}) {
    REQUIRE(::kill(pid, SIGUSR1) == 0);
    REQUIRE(eventually([&] { return is_gone(pid); }));
  }
  REQUIRE(::kill(supervisor, SIGCONT) == 0);
  const Ended ended = wait_without_orphans(job);
  CHECK(ended.code == 11);
  const auto first = ended.err.find("rank 1 (pid " + rank_1);
  const auto second = ended.err.find("rank 0 (pid " + rank_0);
  REQUIRE(first != std::string::npos);
  REQUIRE(second != std::string::npos);
  CHECK(first < second);
}

TEST_CASE(
    "processes that the ranks leave running end with the job, by SIGTERM first", "[process]") {
  const std::string probe = SIGNAL_PROBE " 1 0 ";
  Process job(
      ddprun_sh({"-n", "1"}, "echo rank $$; " + probe + "& setsid " + probe + "& exec " + probe));
  job.read_until("pid ", 3);
  REQUIRE(::kill(numbers_after(job.out(), "rank ").at(0), SIGUSR1) == 0);
  job.read_until("got SIGTERM", 2);
  const Ended ended = wait_without_orphans(job);
  CHECK(ended.code == 0);
  CHECK(ended.err.empty());
}

TEST_CASE("no rank is left even when both of ddprun's processes are killed at once", "[process]") {
  Process job(ddprun_sh({"-n", "2"}, "exec " SIGNAL_PROBE " 1000 0"));
  job.read_until("pid ", 2);
  const auto pids = numbers_after(job.out(), " pid ");
  job.send(SIGSTOP);  // so that it cannot react to the other one's death
  REQUIRE(::kill(numbers_after(job.out(), "parent ").at(0), SIGKILL) == 0);
  job.send(SIGKILL);
  check_end(pids);
  CHECK(job.wait().code == -SIGKILL);
}

TEST_CASE("no orphan is left when ddprun is killed", "[process]") {
  // Ranks that ignore every signal they can, with a child in their group and one outside of it.
  const std::string script =
      "trap '' TERM INT HUP; sleep 1000 & echo pid $!; setsid sleep 1001 & echo pid $!; "
      "echo supervisor $PPID; echo pid $$; while :; do sleep 1002; done";
  Process job(ddprun_sh({"-n", "2"}, script));
  job.read_until("pid ", 6);
  const auto pids = numbers_after(job.out(), "pid ");
  REQUIRE(pids.size() == 6);
  for (const int pid : pids) REQUIRE_FALSE(is_gone(pid));

  const int supervisor = numbers_after(job.out(), "supervisor ").at(0);
  SECTION("the process that the user started") {
    job.send(SIGKILL);
    check_end(pids);
    CHECK(job.wait().code == -SIGKILL);
  }
  SECTION("the process that runs the job") {
    REQUIRE(::kill(supervisor, SIGKILL) == 0);
    check_end(pids);
    const Ended ended = job.wait();
    CHECK(ended.code == 128 + SIGKILL);
    CHECK_THAT(ended.err, ContainsText("supervisor was killed by signal 9 (SIGKILL)"));
  }
  check_end({supervisor});
}
