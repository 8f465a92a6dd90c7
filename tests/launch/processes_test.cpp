// The harness itself: the output of a job, and that a failing test leaves no process running.
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "support/processes.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;
using Lines = std::vector<std::string>;

namespace {

ProcessOptions impatient() {
  ProcessOptions options;
  options.timeout = 100ms;
  return options;
}

std::string error_of_waiting_for(Process& job) {
  try {
    job.wait();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void check_gone_soon(const std::vector<int>& pids) {
  for (const int pid : pids) {
    CAPTURE(pid);
    const bool gone = eventually([&] { return is_gone(pid); }, 30s);
    CHECK(gone);
    if (!gone) ::kill(pid, SIGKILL);
  }
}

}  // namespace

TEST_CASE("a job's lines are sorted by rank", "[process]") {
  // Rank 1's failure would end rank 0: it waits for a file, named after the parent they share.
  const auto script =
      "echo; echo $RANK of $0 >&2; done=/tmp/ddp-test-$PPID; [ $RANK = 1 ] || exec touch $done; "
      "until [ -e $done ]; do sleep 0.01; done; rm $done; exit 7";
  const JobEnded job = run_job(2, {"sh", "-c", script, "it"});
  CHECK(job.code == 7);
  REQUIRE(job.ranks.size() == 2);
  CHECK(job.ranks[0] == Lines{"", "0 of it"});
  CHECK(job.ranks[1] == Lines{"", "1 of it"});
  REQUIRE(job.ddprun.size() == 1);
  CHECK_THAT(job.ddprun[0], ContainsText("exited with code 7"));
  CHECK(lines_of(job.output).size() == 5);
}

TEST_CASE("a job that takes too long names the rank that is stuck", "[process][errors]") {
  Process job(
      ddprun_sh({"-n", "2"}, "echo pid $$; [ $RANK = 1 ] || exit 0; exec sleep 1000"), impatient());
  job.read_until("pid ", 2);
  const auto rank_0 = numbers_after(job.out().substr(job.out().find("[0]")), "pid ").at(0);
  REQUIRE(eventually([&] { return is_gone(rank_0); }));
  const auto error = error_of_waiting_for(job);
  CHECK_THAT(error, ContainsText("still running after the time it had: rank 1\n"));
  CHECK_THAT(error, ContainsText("[1] pid "));
}

TEST_CASE("a program that is not a rank is named with its id", "[process][errors]") {
  Process program({"sleep", "1000"}, impatient());
  const auto name = "/proc/" + std::to_string(program.pid()) + "/comm";
  REQUIRE(eventually([&] {
    std::string runs;
    return static_cast<bool>(std::getline(std::ifstream(name), runs)) && runs == "sleep";
  }));
  CHECK_THAT(
      error_of_waiting_for(program),
      ContainsText("time it had: sleep (pid " + std::to_string(program.pid()) + ")"));
}

TEST_CASE("a job is ended with all its processes, even if ddprun does not end it", "[process]") {
  std::vector<int> pids;
  {
    const std::string probe = "exec " SIGNAL_PROBE " 1000 0";
    Process job(
        ddprun_sh({"-n", "2"}, "echo supervisor $PPID; setsid sh -c \"" + probe + "\" & " + probe));
    job.read_until("pid ", 4);
    pids = numbers_after(job.out(), " pid ");
    const int supervisor = numbers_after(job.out(), "supervisor ").at(0);
    // A stopped ddprun cannot end the ranks.
    REQUIRE(::kill(supervisor, SIGSTOP) == 0);
    pids.push_back(supervisor);
  }
  CHECK(pids.size() == 5);
  check_gone_soon(pids);
}
