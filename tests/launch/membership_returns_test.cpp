// Processes that come back, and a coordinator that lacks time, descriptors or room on a disk.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/launched_job.h"
#include "launch/membership_job.h"
#include "launch/simulator/simulation.h"

#include "support/catch.h"

using namespace ddp::testing;

TEST_CASE("a member whose connection breaks has its part again once it is back", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  SECTION("while it trains") {
    job.close(1);
    job.pass(1500ms, {0});
    job.come_back(1, 11, 1, true);
    job.pass(60s, {0, 11});
    CHECK(job.gather.generation == 0);
    job.say(0, Done{});
    job.say(11, Done{});
    REQUIRE(job.finish);
    CHECK(job.finish->code == 0);
  }
  SECTION("before the coordinator knows of the end of its connection") {
    job.come_back(1, 11, 1, true);
    CHECK(job.closed == std::vector<int>{1});
    job.close(1);
    job.say(1, Done{});  // an old line
    CHECK(job.closed == std::vector<int>{1, 1});
    job.pass(60s, {0, 11});
    CHECK(job.gather.generation == 0);
  }
  SECTION("while it is asked, and did not hear it") {
    job.say(0, Lost{1, {}, {"a connection broke"}});
    job.report({0}, 5);
    job.close(1);
    job.gather = {};
    job.come_back(1, 11, 1, false);
    CHECK(job.gather.generation == 2);
    job.report({11}, 5);
    CHECK(job.slots() == std::vector<int>{0, 1});
  }
  SECTION("after its report, and the others wait for it") {
    job.say(0, Lost{1, {}, {"a connection broke"}});
    job.report({1}, 5);
    job.close(1);
    job.report({0}, 5);
    CHECK(job.form.generation == 1);
    job.come_back(1, 11, 2, false);
    job.look_at_time();
    CHECK(job.form.generation == 2);
    SECTION("and the store was told while its connection was broken") {
      job.close(11);
      job.say(0, Store{2, "h:1"});
      const int before = job.forms;
      job.come_back(1, 12, 2, false);
      CHECK(job.forms == before + 1);
      CHECK(job.stores.back() == 12);
    }
  }
  SECTION("it does not come back") {
    job.close(1);
    job.pass(1500ms, {0});
    CHECK(job.killed.empty());
    job.pass(500ms, {0});
    CHECK(job.killed == std::vector<int>{101});
    job.come_back(1, 11, 1, true);
    CHECK(job.fenced == std::vector<int>{1, 11});
  }
  SECTION("another member's group says that it has ended") {
    job.close(1);
    job.say(0, Lost{1, {2}, {"rank 1 has ended"}});
    CHECK(job.killed == std::vector<int>{101});
  }
}

TEST_CASE("a process that says hello again is the same one", "[pure]") {
  Job job(limits_of(2, 2));
  const auto hello = [&](int process, int connection) {
    const auto id = static_cast<ProcessId>(process + 1);
    job.say(connection, Hello{"t", id, process, 100 + process, "h"});
  };
  job.hello(0, 0);
  job.say(0, Waits{});
  job.hello(1, 1);
  hello(1, 11);
  CHECK(job.let_go.empty());
  CHECK(job.closed == std::vector<int>{1});
  job.say(11, Waits{});
  CHECK(job.form.generation == 1);
  hello(1, 12);  // the generation was formed, and it did not hear it
  CHECK(job.forms == 3);
  job.enter({0, 12});
  hello(1, 11);  // an old line
  CHECK(job.closed.back() == 11);
  job.pass(60s, {0, 12});
  CHECK(job.gather.generation == 0);
  job.say(13, Hello{"t", 99, 1, 200, "h"});  // another process
  CHECK(job.let_go == std::vector<int>{13});
}

TEST_CASE("a process that says hello again on its own connection is the same one", "[pure]") {
  Job job(limits_of(2, 1));
  job.hello(0, 0);
  job.hello(1, 1);
  job.hello(1, 1);
  CHECK(job.you.slot == 1);
  for (const int process : {0, 1}) job.say(process, Waits{});
  CHECK(job.form.generation == 1);
  job.hello(1, 1);
  CHECK(job.forms == 3);  // it hears it again
  job.enter({0, 1});
  SECTION("hello") { job.hello(1, 1); }
  SECTION("back") { job.come_back(1, 1, 1, true); }
  job.pass(60s, {0, 1});
  CHECK(job.gather.generation == 0);
  CHECK(job.closed.empty());
  CHECK(job.let_go.empty());
  CHECK(job.killed.empty());
}

TEST_CASE("a connection on which a second process speaks is closed", "[pure]") {
  Job job(limits_of(2, 1));
  SECTION("before the first generation") {
    for (const int process : {0, 1}) job.hello(process, process);
    SECTION("a process that has its own connection") { job.say(1, Hello{"t", 1, 0, 100, "h"}); }
    SECTION("a new process") { job.say(1, Hello{"t", 99, -1, 200, "h"}); }
    job.say(1, Waits{});  // it was read with the other line
    job.say(11, Hello{"t", 2, 1, 101, "h"});
    job.say(0, Waits{});
    CHECK(job.form.generation == 0);
    job.say(11, Waits{});
  }
  SECTION("while all train") {
    job.begin(2);
    SECTION("a process that has its own connection") { job.come_back(0, 1, 1, true); }
    SECTION("the same, with a hello") { job.say(1, Hello{"t", 1, 0, 100, "h"}); }
    SECTION("a new process") { job.say(1, Hello{"t", 99, -1, 200, "h"}); }
    SECTION("a process of an earlier coordinator") { job.come_back(98, 1, 1, true); }
    job.say(1, Done{});
    job.close(1);
    job.come_back(1, 11, 1, true);
    job.pass(60s, {0, 11});
    CHECK(job.gather.generation == 0);
    for (const int connection : {0, 11}) job.say(connection, Done{});
    REQUIRE(job.finish);
    CHECK(job.finish->code == 0);
  }
  CHECK(job.slots() == std::vector<int>{0, 1});
  CHECK(job.let_go.front() == 1);
  CHECK(job.killed.empty());
}

TEST_CASE("the text to a connection on which a second process speaks", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  job.say(1, Hello{"t", 99, -1, 200, "h"});
  CHECK(job.let_go == std::vector<int>{1});
  CHECK(job.closed == std::vector<int>{1});
  CHECK(job.end.code == 2);
  CHECK(
      job.end.why.value ==
      "connection of rank 1: expected lines of one process, got another one's. Connect each "
      "process by itself");
  job.pass(1500ms, {0});
  CHECK(job.killed.empty());
  job.pass(500ms, {0});  // it does not come back
  CHECK(job.killed == std::vector<int>{101});
}

TEST_CASE("a process that was let go while its connection was broken has left", "[pure]") {
  Job job(limits_of(2, 1));
  job.hello(0, 0);
  job.hello(1, 1);
  job.close(1);
  job.want_to_leave(1);
  CHECK(job.let_go == std::vector<int>{1});
  job.say(11, Hello{"t", 2, 1, 101, "h"});
  CHECK(job.let_go == std::vector<int>{1, 11});
  CHECK(job.end.code == 0);
  job.say(12, Hello{"t", 99, 1, 101, "h"});  // a new one, with the number of a process that is gone
  CHECK(job.you.slot == 1);
  CHECK(job.let_go == std::vector<int>{1, 11});
}

TEST_CASE("a coordinator that did not run for a while hears all before it judges", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  job.pass(5s, {0, 1});
  SECTION("none could speak") {
    job.stand_still(14s);
    job.look_at_time();
    CHECK(job.killed.empty());
    job.pass(9s, {0});
    CHECK(job.killed.empty());
    job.pass(1s, {0});
    CHECK(job.killed == std::vector<int>{101});
  }
  SECTION("the end of a connection is the first that it reads") {
    job.stand_still(14s);
    job.close(1);
    job.look_at_time();
    job.come_back(1, 11, 1, true);
    job.pass(60s, {0, 11});
    CHECK(job.killed.empty());
  }
}

TEST_CASE(
    "a job goes on without a start that failed, and without the coordinator's file", "[pure]") {
  LaunchedJob job([](const Remembered&) { throw std::runtime_error("--state: no room"); });
  job.begin();
  const auto& told = job.told;
  job.say(0ms, 9, "exited 1 101 137 0 was killed");
  CHECK(told.back() == "replace 1 1 1");
  job.say(6000ms, 9, "exited 1 0 1 0 could not be started: no descriptor is left");
  const auto said = told.at(told.size() - 2);
  CHECK(
      said ==
      "say rank 1 could not be started: no descriptor is left; starting another one (2 of 10)");
  CHECK(told.back() == "replace 1 2 1");
  const auto is_of_state = [](const std::string& line) {
    return line.rfind("say --state: no room. The job goes on", 0) == 0;
  };
  CHECK(std::count_if(told.begin(), told.end(), is_of_state) == 1);
}

TEST_CASE("broken connections and stops of the coordinator cost no rank and no step", "[pure]") {
  int breaks = 0, stops = 0;
  const int first = first_schedule() / 3, all = schedules() / 3;
  for (int i = first; i < first + all; ++i) {
    Schedule schedule;
    schedule.seed = static_cast<uint64_t>(i) + 1;
    schedule.ranks = schedule.min_ranks = 1 + i % 5;
    schedule.launched = i % 2 == 0;
    schedule.breaks = schedule.healthy = true;
    const Outcome outcome = simulate(schedule);
    if (!outcome.error.empty()) FAIL(outcome.error);
    const bool ended_well =
        outcome.code == 0 || outcome.generations == 0;  // the ranks did not meet
    if (outcome.lost > 0 || !ended_well) FAIL("seed " << schedule.seed << " lost a rank");
    breaks += outcome.breaks;
    stops += outcome.stops;
  }
  CHECK(breaks > all);
  CHECK(stops > all / 4);
}
