// Ranks that start again together, and the logs of their output.
#include <csignal>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

const std::string kSayAttempt =
    "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; ";

}  // namespace

TEST_CASE("after a failure all ranks start again, and restarts are counted", "[process]") {
  // Rank 0 would run for ever: ddprun ends it, too, after its line.
  const TemporaryFolder folder;
  const std::string spoken = folder.file("spoken");
  const Ended job = run(ddprun_sh(
      {"-n", "2", "--max-restarts", "3"},
      kSayAttempt + "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; said=" + spoken +
          "$TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] && touch $said && exec sleep 100; "
          "until [ -e $said ]; do sleep 0.01; done; exit 5"));
  CHECK(job.code == 0);
  std::vector<std::string> expected;
  for (const char* rank : {"[0]", "[1]"}) {
    for (int attempt = 0; attempt < 3; ++attempt) {
      expected.push_back(std::string(rank) + " attempt " + std::to_string(attempt) + " of 3");
    }
  }
  CHECK(sorted_lines(job.out) == expected);
  CHECK_THAT(
      job.err, ContainsText("exited with code 5; ending the other 1 rank\n") &&
                   ContainsText("ddprun: restart 1 of 3: starting 2 ranks again\n") &&
                   ContainsText("ddprun: restart 2 of 3: starting 2 ranks again\n"));
  CHECK(job.err.find("restart 3") == std::string::npos);
}

TEST_CASE("ddprun gives up when no restart is left", "[process]") {
  const Ended job = run(ddprun_sh({"-n", "1", "--max-restarts", "2"}, kSayAttempt + "exit 7"));
  CHECK(job.code == 7);
  CHECK(job.out == "[0] attempt 0 of 2\n[0] attempt 1 of 2\n[0] attempt 2 of 2\n");
  CHECK_THAT(job.err, ContainsText("ddprun: gave up: no restart of 2 is left\n"));
}

TEST_CASE("a crash is restarted, a signal to ddprun is not", "[process]") {
  const Ended crashed = run(ddprun_sh(
      {"-n", "1", "--max-restarts", "1"}, "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -SEGV $$"));
  CHECK(crashed.code == 0);

  Process job(ddprun_sh({"-n", "1", "--max-restarts", "5"}, kSayAttempt + "exec sleep 100"));
  job.read_until("attempt 0");
  job.send(SIGTERM);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK(ended.out == "[0] attempt 0 of 5\n");
}

TEST_CASE("a signal while the ranks of a failed attempt end stops the restarts", "[process]") {
  // Rank 0 ends at its second signal: the first is ddprun's own, the second the test's.
  const TemporaryFolder folder;
  const std::string ready = folder.file("ready");
  Process job(ddprun_sh(
      {"-n", "2", "--max-restarts", "5"}, kSayAttempt + "[ $RANK = 1 ] && { until [ -e " + ready +
                                              " ]; do sleep 0.01; done; exit 5; }; trap 'echo "
                                              "ending; trap \"exit 0\" TERM' TERM; touch " +
                                              ready + "; while :; do sleep 0.05; done"));
  job.read_until("ending");
  job.send(SIGTERM);
  const Ended ended = job.wait();
  CHECK(ended.code == 5);
  CHECK(ended.out.find("attempt 1") == std::string::npos);
}

TEST_CASE("--log-dir keeps what each rank writes in each attempt", "[process]") {
  const TemporaryFolder folder;
  const auto logs = folder.path() + "/new/logs";
  // In the first attempt both fail, once both have written.
  const auto mark = folder.path() + "/$TORCHELASTIC_RESTART_COUNT.";
  const Ended job = run(ddprun_sh(
      {"-n", "2", "--max-restarts", "1", "--log-dir", logs},
      "echo rank $RANK; echo complaint >&2; printf '\\033[1mbold\\033[0m end'; >" + mark +
          "$RANK; until [ -e " + mark + "0 ] && [ -e " + mark +
          "1 ]; do sleep 0.01; done; [ $TORCHELASTIC_RESTART_COUNT = 1 ]"));
  CHECK(job.code == 0);
  CHECK_THAT(job.out, ContainsText("[1] rank 1\n"));
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (int rank = 0; rank < 2; ++rank) {
      CAPTURE(attempt, rank);
      const auto text = read_bytes(
          logs + "/attempt_" + std::to_string(attempt) + "/rank_" + std::to_string(rank) + ".log");
      CHECK(
          sorted_lines(text) ==
          std::vector<std::string>{"bold end", "complaint", "rank " + std::to_string(rank)});
    }
  }
}

TEST_CASE("a log that cannot be made is one clear error", "[process][errors]") {
  const Ended job = run(ddprun_sh({"-n", "2", "--log-dir", "/dev/null/logs"}, "echo started"));
  CHECK(job.code == 1);
  CHECK(job.out.empty());
  CHECK_THAT(
      job.err, ContainsText("ddprun: --log-dir: cannot make the folder '/dev/null/logs': Not a "
                            "directory\n"));
}

TEST_CASE("a full disk of a log is reported, and the job continues", "[process][errors]") {
  const TemporaryFolder folder;
  const auto attempt = folder.path() + "/attempt_0";
  REQUIRE(::mkdir(attempt.c_str(), 0777) == 0);
  REQUIRE(::symlink("/dev/full", (attempt + "/rank_0.log").c_str()) == 0);
  const Ended job = run(ddprun_sh({"-n", "1", "--log-dir", folder.path()}, "echo done"));
  CHECK(job.code == 0);
  CHECK(job.out == "[0] done\n");
  CHECK_THAT(job.err, ContainsText("the logs are not complete: No space left on device"));
}
