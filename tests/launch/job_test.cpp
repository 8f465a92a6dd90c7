// The decisions of a job that restarts as a whole: lines in, lines out, without a process.
#include "launch/job/job.h"

#include <string>
#include <vector>

#include "launch/told.h"
#include "support/catch.h"

using ddp::testing::Lines;
using ddp::testing::Told;
using namespace std::chrono_literals;

namespace {

/// Starts four ranks, whose processes are 10 to 13, and drops the lines of their start.
void start_on_two_hosts(Told& job) {
  job.join(1, 0, "2 2 3");
  job.join(2, 1, "2 2 3");
  for (int rank = 0; rank < 4; ++rank) {
    job.say(1 + rank / 2, "started " + std::to_string(rank) + " " + std::to_string(10 + rank));
  }
  job.to(1);
  job.to(2);
}

const std::string kOfOtherJob =
    "finish 1 0 --rdzv-id: expected that of the job at this endpoint, or its --token, got 'other'. "
    "Give all hosts of a job the same; two jobs need two ports.";

}  // namespace

TEST_CASE("a job of one host starts at once, and again after a failure", "[pure]") {
  Told job(1, 1);
  job.join(1, 0, "1 2 1");
  CHECK(job.to(1) == Lines{"start 0 101"});
  job.say(1, "started 0 10");
  job.say(1, "started 1 11");
  job.say(1, "exited 1 11 3 0 exited with code 3");
  CHECK(
      job.to(1) ==
      Lines{"say rank 1 (pid 11) exited with code 3; ending the other 1 rank", "stop"});
  job.say(1, "exited 0 10 4 0 exited with code 4");
  job.say(1, "gone");
  CHECK(
      job.to(1) == Lines{
                       "say rank 0 (pid 10) exited with code 4",
                       "say restart 1 of 1: starting 2 ranks again", "start 1 102"});
  job.say(1, "started 0 12");
  job.say(1, "started 1 13");
  SECTION("no restart is left") {
    job.say(1, "exited 0 12 5 0 exited with code 5");
    job.say(1, "exited 1 13 143 1 was killed by signal 15 (SIGTERM)");  // as it was told
    CHECK(
        job.to(1) == Lines{
                         "say rank 0 (pid 12) exited with code 5; ending the other 1 rank",
                         "finish 5 0 gave up: no restart of 1 is left"});
    CHECK(job.exit_code() == 5);
  }
  SECTION("all succeed") {
    job.say(1, "exited 0 12 0 0 exited with code 0");
    CHECK(!job.exit_code());
    job.say(1, "exited 1 13 0 0 exited with code 0");
    CHECK(job.to(1) == Lines{"finish 0 0 "});
    CHECK(job.exit_code() == 0);
  }
  SECTION("a signal decides the exit code") {
    job.say(1, "signal 15");
    CHECK(job.to(1) == Lines{"finish 143 0 "});
    CHECK(job.exit_code() == 143);
  }
}

TEST_CASE("a signal while an attempt is being ended leaves the failure's exit code", "[pure]") {
  Told job(1, 3);
  job.join(1, 0, "1 2 3");
  job.say(1, "started 0 10");
  job.say(1, "exited 0 10 7 0 exited with code 7");
  job.to(1);
  job.say(1, "signal 15");
  CHECK(job.to(1) == Lines{"finish 7 0 "});
  CHECK(job.exit_code() == 7);
}

TEST_CASE("ranks that leave after a notice are not started again", "[pure]") {
  Told job(2, 3);
  start_on_two_hosts(job);
  // To the ranks of one host. The first to leave is another host's.
  job.say(1, "notice 10");
  job.say(2, "exited 3 13 143 0 exited with code 143");
  CHECK(
      job.to(2) ==
      Lines{
          "say rank 3 (pid 13) exited with code 143; the job leaves and is not started again",
          "finish 143 30000 "});
  CHECK(job.to(1) == Lines{"finish 143 30000 "});
  CHECK(job.exit_code() == 143);
  job.say(1, "exited 1 11 143 0 exited with code 143");  // before the host had that line
  CHECK(job.to(1).empty());
  job.say(1, "exited 0 10 1 0 exited with code 1");
  CHECK(job.to(1) == Lines{"say rank 0 (pid 10) exited with code 1"});
}

TEST_CASE("a rank that the notice itself ends leaves, for it had no handler yet", "[pure]") {
  Told job(2, 3);
  start_on_two_hosts(job);
  job.say(1, "notice 10");
  SECTION("by that signal") {
    job.say(2, "exited 3 13 138 1 was killed by signal 10 (SIGUSR1)");
    CHECK(
        job.to(2) ==
        Lines{
            "say rank 3 (pid 13) was killed by signal 10 (SIGUSR1); the job leaves and "
            "is not started again",
            "finish 143 30000 "});
    CHECK(job.exit_code() == 143);
    job.say(1, "exited 1 11 138 1 was killed by signal 10 (SIGUSR1)");
    CHECK(job.to(1) == Lines{"finish 143 30000 "});
  }
  SECTION("by another one") {
    job.say(2, "exited 3 13 140 0 was killed by signal 12 (SIGUSR2)");
    CHECK(job.to(2).back() == "stop");
    CHECK(!job.exit_code());
  }
}

TEST_CASE("after a notice a failure is one, and code 143 without a notice", "[pure]") {
  Told job(1, 3);
  job.join(1, 0, "1 2 3");
  job.say(1, "started 0 10");
  job.say(1, "started 1 11");
  SECTION("another code") {
    job.say(1, "notice 10");
    job.say(1, "exited 1 11 1 0 exited with code 1");
  }
  SECTION("no notice") { job.say(1, "exited 1 11 143 0 exited with code 143"); }
  SECTION("no notice, and killed by such a signal") {
    job.say(1, "exited 1 11 138 0 was killed by signal 10 (SIGUSR1)");
  }
  SECTION("a notice of the attempt before") {
    job.say(1, "notice 10");
    job.say(1, "exited 1 11 1 0 exited with code 1");
    job.say(1, "gone");
    job.say(1, "started 0 12");
    job.say(1, "started 1 13");
    job.say(1, "exited 1 13 143 0 exited with code 143");
  }
  CHECK(job.to(1).back() == "stop");
  CHECK(!job.exit_code());
}

TEST_CASE("one host without restarts keeps the port that it was given", "[pure]") {
  Told job(1, 1, 29500);
  job.join(1, 0, "1 2 1");
  CHECK(job.to(1) == Lines{"start 0 29500"});
}

TEST_CASE("hosts that restart together begin once all are there", "[pure]") {
  Told job(2, 1, 29500);
  job.join(1, 0, "2 2 1");
  CHECK(job.to(1).empty());
  SECTION("those that do not fit are refused") {
    job.join(2, 1, "2 2 5");
    CHECK(
        job.to(2) == Lines{"finish 1 0 expected node 0's --nnodes 2, --nproc-per-node 2 and "
                           "--max-restarts 1, got 2, 2 and 5"});
    job.join(3, 0, "2 2 1");
    CHECK(
        job.to(3) ==
        Lines{"finish 1 0 --node-rank: expected one host with each, got a second one with 0"});
    job.say(4, "host t 1 1 2 2 1 0");
    CHECK(job.to(4) == Lines{"finish 1 0 --elastic: expected it on all hosts, or on none"});
    job.say(5, "host other 0 1 2 2 1 0");
    job.say(6, "GET / HTTP/1.1");
    job.say(7, "host t 0 1");
    job.join(8, 2, "2 2 1");  // no such node
    CHECK(job.closed == std::vector<int>{2, 3, 4, 5, 6, 7, 8});
    for (const int stranger : {6, 7, 8}) CHECK(job.to(stranger).empty());
    CHECK(job.to(5) == Lines{kOfOtherJob});
  }
  SECTION("a host that is gone before that may come again") {
    job.join(2, 1, "2 2 1");
    CHECK(job.to(2) == Lines{"start 0 101"});
    CHECK(job.to(1) == Lines{"start 0 101"});
  }
  SECTION("hosts of two jobs come to one endpoint") {
    job.say(2, "host other 0 1 2 2 1 0");
    CHECK(job.to(2) == Lines{kOfOtherJob});
    CHECK(job.closed == std::vector<int>{2});
    job.say(3, "host other 0 1 2 2 1 0");
    job.say(4, "host \x1b[2J 0 1 2 2 1 0");
    // Its ranks run, and wait for their own job's coordinator.
    job.say(5, "host third 0 1 2 2 1 2");
    CHECK(job.to(5).empty());
    job.pass(300000ms);
    CHECK(
        job.to(1) == Lines{"finish 1 0 expected 2 hosts within 5 minutes, got 1. Others came with "
                           "the --rdzv-id 'other', and here it is 't': give all hosts of a job the "
                           "same."});
  }
  SECTION("not all come in time") {
    REQUIRE(job.next_time() == 300000ms);
    job.pass(299999ms);
    CHECK(!job.exit_code());
    job.pass(1ms);
    CHECK(
        job.to(1) ==
        Lines{"finish 1 0 expected 2 hosts within 5 minutes, got 1. Start ddprun on the others."});
    CHECK(job.exit_code() == 1);
  }
}

TEST_CASE("a host that has not reported its ranks gets the reason of their end", "[pure]") {
  Told job(2, 1);
  job.join(1, 0, "2 2 1");
  job.join(2, 1, "2 2 1");
  const int told = GENERATE(0, 1);  // the first host's ranks that it has told of
  if (told == 1) job.say(1, "started 0 10");
  job.to(1);
  job.say(2, "started 3 13");
  job.say(2, "exited 3 13 9 0 exited with code 9");
  CHECK(
      job.to(1) ==
      Lines{"say another host ended the attempt; ending the ranks of this one", "stop"});
}

TEST_CASE("what ends one host's ranks ends those of the others", "[pure]") {
  Told job(2, 1);
  job.join(1, 0, "2 2 1");
  job.join(2, 1, "2 2 1");
  for (const int client : {1, 2}) {
    for (const int local : {0, 1}) {
      const int rank = 2 * (client - 1) + local;
      job.say(client, "started " + std::to_string(rank) + " " + std::to_string(10 + rank));
    }
    job.to(client);
  }
  const std::string other = "say another host ended the attempt; ending the ranks of this one";
  SECTION("a rank fails: all start again once all are gone") {
    job.say(2, "exited 3 13 9 0 exited with code 9");
    CHECK(job.to(1) == Lines{other, "stop"});
    job.say(2, "gone");
    CHECK(job.to(1).empty());
    job.say(1, "gone");
    CHECK(job.to(1) == Lines{"say restart 1 of 1: starting 2 ranks again", "start 1 102"});
    CHECK(!job.exit_code());
  }
  SECTION("its ddprun gets a signal") {
    job.say(2, "signal 15");
    CHECK(job.to(1) == Lines{other, "finish 143 0 node 1 ended the job with code 143"});
    CHECK(job.to(2) == Lines{"finish 143 0 "});
  }
  SECTION("its ddprun is lost") {
    job.lose(2);
    CHECK(job.to(1) == Lines{other, "finish 1 0 the ddprun of node 1 is gone"});
    CHECK(job.exit_code() == 1);
  }
  SECTION("a host that is slow to stop starts with the others") {
    job.say(1, "exited 0 10 9 0 exited with code 9");
    job.say(1, "gone");
    job.say(2, "started 2 12");  // said before it read "stop"
    job.say(2, "exited 2 12 143 1 was killed by signal 15 (SIGTERM)");
    CHECK(
        job.to(1) ==
        Lines{"say rank 0 (pid 10) exited with code 9; ending the other 1 rank", "stop"});
    job.say(2, "gone");
    CHECK(job.to(1) == Lines{"say restart 1 of 1: starting 2 ranks again", "start 1 102"});
    job.say(1, "started 0 20");
    job.say(1, "exited 0 10 9 0 was killed by signal 9 (SIGKILL)");  // of the first attempt
    CHECK(job.to(1).empty());
  }
  SECTION("a host that does not stop counts as lost") {
    job.say(1, "exited 0 10 9 0 exited with code 9");
    job.say(1, "gone");
    job.to(1);
    REQUIRE(job.next_time() == 25000ms);
    job.pass(25000ms);
    CHECK(job.to(1) == Lines{"finish 9 0 the ddprun of node 1 is gone"});
    CHECK(job.exit_code() == 9);
  }
  SECTION("a host that is lost while an attempt is being ended leaves the failure's code") {
    job.say(1, "exited 0 10 9 0 exited with code 9");
    job.to(1);
    job.lose(2);
    CHECK(job.to(1) == Lines{"finish 9 0 the ddprun of node 1 is gone"});
  }
  SECTION("a host whose ranks have succeeded starts them again, too") {
    job.say(1, "exited 0 10 0 0 exited with code 0");
    job.say(1, "exited 1 11 0 0 exited with code 0");
    CHECK(job.to(1).empty());
    job.say(2, "exited 3 13 9 0 exited with code 9");
    CHECK(job.to(1) == Lines{"stop"});
  }
}

TEST_CASE("in a rendezvous hosts get their numbers in the order in which they come", "[pure]") {
  auto options = Told::options(3, 1, 29500);
  options.rendezvous = true;
  Told job(options);
  job.join(1, 0, "3 2 1");  // node 0's own
  job.join(2, -1, "3 4 1");
  job.lose(2);  // before all were there
  job.join(3, -1, "3 1 1");
  CHECK(job.to(1).empty());
  SECTION("each learns the ranks of all, also when they start again") {
    job.join(4, -1, "3 4 1");
    CHECK(job.to(1) == Lines{"node 0 2 1 4", "start 0 101"});
    CHECK(job.to(3) == Lines{"node 1 2 1 4", "start 0 101"});
    CHECK(job.to(4) == Lines{"node 2 2 1 4", "start 0 101"});
    job.join(5, -1, "3 2 1");
    CHECK(job.to(5) == Lines{"finish 1 0 --nnodes: expected 3 hosts, got another one"});
    job.say(3, "started 2 30");
    job.say(3, "exited 2 30 9 0 exited with code 9");
    for (const int client : {1, 3, 4}) {
      job.to(client);
      job.say(client, "gone");
    }
    CHECK(
        job.to(3) ==
        Lines{"say restart 1 of 1: starting 1 rank again", "node 1 2 1 4", "start 1 102"});
  }
  SECTION("of another job: another token, or other options") {
    job.say(6, "host other 0 -1 3 2 1 0");
    CHECK(job.to(6) == Lines{kOfOtherJob});
    CHECK(job.closed == std::vector<int>{6});
    job.join(7, -1, "2 2 1");
    CHECK(
        job.to(7) == Lines{"finish 1 0 expected node 0's --nnodes 3, --nproc-per-node 2 and "
                           "--max-restarts 1, got 2, 2 and 1"});
  }
}

TEST_CASE("a host without a number is refused where all have theirs", "[pure]") {
  Told job(2, 1, 29500);
  job.join(1, 0, "2 2 1");
  job.join(2, -1, "2 2 1");
  CHECK(
      job.to(2) == Lines{"finish 1 0 --node-rank: expected it on all hosts, or --rdzv-backend c10d "
                         "on node 0, too"});
}

TEST_CASE("an elastic job gives a host the lowest number that is free", "[pure]") {
  auto options = Told::options(2, 1, 29500);
  options.rendezvous = true;
  options.elastic.emplace();
  options.elastic->max_ranks = 4;
  options.elastic->min_ranks = options.elastic->first_ranks = 2;
  Told job(options);
  const auto join = [&](int client, int node, const std::string& ranks) {
    job.say(client, "host t 1 " + std::to_string(node) + " 2 " + ranks + " 1 0");
  };
  join(1, 0, "2");
  CHECK(job.to(1) == Lines{"node 0 ", "start 0 101"});
  join(2, -1, "3");
  CHECK(job.to(2) == Lines{"finish 1 0 --nproc-per-node: expected node 0's 2, got 3"});
  join(3, -1, "2");
  CHECK(job.to(3) == Lines{"node 1 ", "start 0 101"});
  join(4, -1, "2");
  CHECK(job.to(4) == Lines{"finish 1 0 --nnodes: expected 2 hosts, got another one"});
}

TEST_CASE("hosts with other numbers of ranks have to have those of the list", "[pure]") {
  auto options = Told::options(2, 1, 29500);
  options.ranks_of_nodes = {2, 3};
  Told job(options);
  job.join(1, 0, "2 2 1");
  job.join(2, 1, "2 2 1");
  CHECK(
      job.to(2) == Lines{"finish 1 0 expected node 0's --nnodes 2, --nproc-per-node 3 and "
                         "--max-restarts 1, got 2, 2 and 1"});
  job.join(3, 1, "2 3 1");
  CHECK(job.to(3) == Lines{"start 0 101"});
}
