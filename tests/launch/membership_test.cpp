#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "comm/membership/member.h"
#include "launch/job/job.h"
#include "launch/launched_job.h"
#include "launch/membership_job.h"
#include "launch/simulator/simulation.h"

#include "support/catch.h"

using namespace ddp::testing;

TEST_CASE("messages are lines, and other lines are none", "[pure]") {
  const Form form{3, 117, 118, {{7, 0}, {9, 3}}, {9}};
  CHECK(line_of(CoordinatorMessage(form)) == "form 3 117 118 7:0,9:3 9");
  const auto read = message_of<CoordinatorMessage>("form 3 117 118 7:0,9:3 -");
  REQUIRE(read);
  CHECK(std::get<Form>(*read).members == form.members);
  CHECK(std::get<Form>(*read).sources.empty());
  CHECK(line_of(MemberMessage(Threw{4, {"out of\nmemory"}})) == "threw 4 out of memory");
  for (const char* line :
       {"", "hullo", "met", "met x", "met 1 2", "alive 1", "report 1 2 3 7", "hello t 1 0 5",
        "form 1 0 0 7 -", "form 1 0 0  -", "met 99999999999999999999"}) {
    CAPTURE(line);
    CHECK(!message_of<MemberMessage>(line));
    CHECK(!message_of<CoordinatorMessage>(line));
  }
}

TEST_CASE("a lost rank's replacement enters from those that have the last step", "[pure]") {
  Job job(limits_of(3, 3));
  job.begin(3);
  CHECK(job.form.generation == 1);
  job.die(0);
  CHECK(job.gather.generation == 2);
  job.report({1}, 10);
  job.report({2}, 11);
  CHECK(job.form.generation == 1);  // the default minimum is all
  job.hello(3, 0);
  job.say(3, Waits{});
  CHECK(job.slots() == std::vector<int>{0, 1, 2});
  CHECK(job.form.applied == 11);
  CHECK(job.form.sources == std::vector<ProcessId>{3});
}

TEST_CASE("with a smaller minimum the others go on, and let a process in later", "[pure]") {
  Job job(limits_of(3, 2));
  job.begin(2);
  CHECK(job.form.generation == 0);
  job.pass(600s, {0, 1});  // for the third
  CHECK(job.slots() == std::vector<int>{0, 1});
  job.enter({0, 1});
  job.hello(2, 2);
  job.say(2, Waits{});
  CHECK(job.changes == 2);
  job.say(0, Pauses{1});
  CHECK(job.gather.generation == 0);  // nothing is lost: the other one ends its turn
  job.say(1, Pauses{1});
  job.report({0, 1}, 5);
  CHECK(job.slots() == std::vector<int>{0, 1, 2});
}

TEST_CASE("a process that was killed is gone before a generation begins", "[pure]") {
  Job job(limits_of(3, 2));
  job.begin(3);
  job.pass(10s, {0, 1});
  CHECK(job.killed == std::vector<int>{102});
  CHECK(job.fenced == std::vector<int>{2});
  job.report({0, 1}, 4);
  CHECK(job.form.generation == 1);
  job.die(2);
  CHECK(job.form.generation == 2);
}

TEST_CASE("a coordinator that starts again waits for the generation it formed", "[pure]") {
  Job earlier(limits_of(4, 1));
  earlier.begin(4);
  earlier.die(3);
  earlier.report({0}, 8);
  earlier.report({1, 2}, 7);
  const auto remembered = earlier.remembered;
  CHECK(remembered.formed == 2);

  const auto back = [](Job& job, int process, int64_t generation) {
    job.say(
        process, Back{
                     "t", static_cast<ProcessId>(process + 1), process, 100 + process, "h",
                     generation, true});
  };
  Job all(limits_of(4, 1), remembered);
  back(all, 3, 1);
  CHECK(all.fenced == std::vector<int>{3});
  for (const int process : {0, 1, 2}) back(all, process, 2);
  all.hello(4, 3);
  all.say(4, Waits{});
  CHECK(all.changes == 3);  // it goes on where it was

  Job done(limits_of(4, 1), remembered);  // while there was no coordinator
  for (const int process : {0, 1, 2}) {
    back(done, process, 2);
    done.say(process, Done{});
  }
  REQUIRE(done.finish);
  CHECK(done.finish->code == 0);

  Job paused(limits_of(4, 1), remembered);
  for (const int process : {0, 1, 2}) {
    back(paused, process, 2);
    paused.say(process, Pauses{2});
  }
  CHECK(paused.gather.generation == 3);

  Job minority(limits_of(4, 1), remembered);
  back(minority, 1, 2);
  minority.pass(60s, {1});
  CHECK(minority.gather.generation == 0);
  back(minority, 2, 2);
  CHECK(minority.gather.generation == 3);
}

TEST_CASE("a process that leaves stays while it alone has the last step", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  job.say(0, Leaves{});
  CHECK(job.changes == 2);
  job.say(1, Lost{1, {}, {"a connection broke"}});
  job.report({0}, 5);
  job.report({1}, 4);
  CHECK(job.let_go.empty());
  CHECK(job.slots() == std::vector<int>{0, 1});
  job.enter({0, 1});
  CHECK(job.changes == 4);
  job.say(0, Pauses{2});
  job.say(1, Pauses{2});
  job.report({0, 1}, 6);
  CHECK(job.let_go == std::vector<int>{0});
  CHECK(job.slots() == std::vector<int>{1});
}

TEST_CASE("making groups has a bound, and the state's way has none", "[pure]") {
  Job job(limits_of(2, 1));
  job.hello(0, 0);
  job.hello(1, 1);
  for (const int process : {0, 1}) job.say(process, Waits{});
  job.enter({0, 1});
  job.say(0, Lost{1, {}, {"a connection broke"}});
  job.report({0, 1}, 5);
  job.say(0, Met{2});
  job.pass(29s, {0, 1});
  CHECK(job.killed.empty());
  job.pass(1s, {0, 1});
  CHECK(job.killed == std::vector<int>{101});
  job.die(1);
  job.report({0}, 5);
  job.say(0, Met{3});
  job.pass(300s, {0});
  CHECK(job.gather.generation == 3);
}

TEST_CASE("a rank that half of the others accuse has little time to answer", "[pure]") {
  Job job(limits_of(3, 1));
  job.begin(3);
  job.say(0, Lost{1, {3}, {"timeout"}});
  job.say(1, Lost{1, {3}, {"timeout"}});
  job.report({0, 1}, 5);
  job.pass(4s, {0, 1, 2});
  CHECK(job.killed.empty());
  job.pass(1s, {0, 1, 2});
  CHECK(job.killed == std::vector<int>{102});
}

TEST_CASE("an accused rank that alone does not answer has little time to do so", "[pure]") {
  Job job(limits_of(4, 1));
  job.begin(4);
  job.say(0, Lost{1, {4}, {"timeout"}});  // the others are stopped before they accuse it
  job.report({0, 1}, 5);
  job.pass(20s, {0, 1, 2, 3});
  CHECK(job.killed.empty());
  job.report({2}, 5);
  job.look_at_time();
  CHECK(job.killed == std::vector<int>{103});
}

TEST_CASE("a step that is lost three times ends the job with the first cause", "[pure]") {
  Job job(limits_of(4, 1));
  job.begin(4);
  for (int loss = 0; loss < 3; ++loss) {
    job.die(3 - loss);
    CHECK(!job.finish);
    std::vector<int> left = Job::all(3 - loss);
    job.report(left, 7);
    if (loss < 2) job.enter(left);
  }
  REQUIRE(job.finish);
  CHECK(job.finish->code == 1);
  CHECK(job.finish->why == "step 8 failed 3 times; the first time: rank 3 was killed");
}

TEST_CASE("ranks that fail to meet ten times in a row end the job", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  const auto fails = [&](int times) {
    for (int i = 0; i < times; ++i) {
      CHECK(!job.finish);
      job.report({0, 1}, 5);
      job.say(0, Lost{job.gather.generation, {}, {"no port is free"}});
    }
  };
  job.say(0, Lost{1, {}, {"a connection broke"}});
  fails(9);
  job.report({0, 1}, 5);
  job.enter({0, 1});  // the tenth attempt
  job.say(0, Lost{job.gather.generation, {}, {"a connection broke"}});
  fails(10);
  REQUIRE(job.finish);
  CHECK(
      job.finish->why ==
      "the ranks failed to meet 10 times in a row; the last time: no port is free");
}

TEST_CASE("a loss before the first generation is entered starts all again", "[pure]") {
  Job job(limits_of(2, 1));
  job.hello(0, 0);
  job.hello(1, 1);
  for (const int process : {0, 1}) job.say(process, Waits{});
  job.say(0, Entered{1});
  job.die(1);
  CHECK(job.again);
}

TEST_CASE("what was started by hand gathers after a loss in the first generation", "[pure]") {
  Job job(limits_of(3, 2));
  job.start_by_hand();
  for (const int process : {0, 1, 2}) job.hello(process, process);
  for (const int process : {0, 1, 2}) job.say(process, Waits{});
  SECTION("a member is lost, and nobody has entered") {
    job.lose(2, {0, 1});
    CHECK(job.gather.generation == 2);
    for (const int process : {0, 1}) job.say(process, Report{2, 0, 0, Holding::None});
    CHECK(job.slots() == std::vector<int>{0, 1});
    CHECK(job.form.sources.empty());
    job.enter({0, 1});
    job.lose(1, {0});
    CHECK(job.gather.generation == 3);
  }
  SECTION("a member is lost, and another one has entered") {
    job.enter({0});
    job.lose(2, {0, 1});
    job.report({0}, 0);
    job.say(1, Report{2, 0, 0, Holding::None});
    CHECK(job.slots() == std::vector<int>{0, 1});
    CHECK(job.form.sources == std::vector<ProcessId>{1});
  }
  SECTION("too few are left, and another one comes") {
    job.close(2);
    job.lose(1, {0});
    job.say(0, Report{2, 0, 0, Holding::None});
    CHECK(job.form.generation == 1);
    job.hello(3, 1);
    CHECK(!job.you.joins);  // it begins with the others, for none has a state
    job.say(3, Waits{});
    CHECK(job.slots() == std::vector<int>{0, 1});
    CHECK(job.form.generation == 2);
    job.enter({0, 3});
    job.hello(4, 2);
    CHECK(job.you.joins);
  }
  SECTION("all are lost") {
    job.hello(3, 3);
    job.say(3, Waits{});
    for (const int process : {1, 2}) job.close(process);
    job.lose(0, {3});
    REQUIRE(job.finish);
    CHECK(job.let_go == std::vector<int>{3});
    CHECK(
        job.finish->why ==
        "expected a rank that has the state, got none that is left: rank 0 closed its connection");
  }
  SECTION("a member throws") {
    job.say(2, Threw{0, {"other options"}});
    REQUIRE(job.finish);
    CHECK(job.let_go == std::vector<int>{0, 1, 2});
    CHECK(job.finish->why == "rank 2 threw: other options");
  }
  SECTION("a member throws once it trains, and others have met, but not entered") {
    job.enter({2});
    for (const int process : {0, 1}) job.say(process, Met{1});
    job.say(2, Threw{0, {"in its first step"}});
    CHECK(!job.finish);
    for (const int process : {0, 1}) job.say(process, Report{2, 0, 0, Holding::None});
    CHECK(job.slots() == std::vector<int>{0, 1});
  }
  CHECK(!job.again);
}

TEST_CASE("a member whose work is done does not wait long for a lost coordinator", "[pure]") {
  Member member({"t", 7, -1, 100, "h"}, 0ms);
  member.on_connected(0ms);
  member.on_message(0ms, You{0, 2, false, 10000, 600000});
  member.ready();
  member.on_message(0ms, Form{1, 0, 0, {{7, 0}}, {}});
  member.met(1);
  member.entered(1);
  SECTION("it waits where it has work") {
    member.done(1000ms, 1);
    member.on_disconnected(1000ms);
    member.on_time(600000ms);
    CHECK(member.end().how == Member::Ending::None);
    member.on_time(601000ms);
    CHECK(member.end().how == Member::Ending::Failed);
  }
  SECTION("it has left once it is done") {
    member.done(1000ms, 1);
    member.set_coordinator_patience(1000ms);
    member.on_time(9000ms);
    CHECK(member.end().how == Member::Ending::None);  // connected
    member.on_disconnected(9000ms);
    CHECK(member.next_time() <= 10000ms);
    member.on_time(10000ms);
    CHECK(member.end().how == Member::Ending::Left);
  }
  SECTION("it fails where a generation ended") {
    member.set_coordinator_patience(5000ms);
    member.on_disconnected(1000ms);
    member.on_time(60000ms);
    CHECK(member.end().how == Member::Ending::None);  // the others train
    member.lost(60000ms, 1, {}, "a connection broke");
    member.on_time(64000ms);
    CHECK(member.end().how == Member::Ending::None);
    member.on_time(65000ms);
    CHECK(member.end().how == Member::Ending::Failed);
    CHECK(member.end().why == "the coordinator cannot be reached");
  }
  SECTION("it leaves without it") {
    member.set_coordinator_patience(1000ms);
    member.on_disconnected(1000ms);
    member.leave();
    member.on_time(2000ms);
    CHECK(member.end().how == Member::Ending::Failed);
  }
}

TEST_CASE(
    "the coordinator tells a member with a loopback address where others reach it", "[pure]") {
  ddp::launch::LaunchOptions options;
  options.elastic.emplace();
  options.elastic->max_ranks = options.elastic->min_ranks = 2;
  std::vector<std::pair<int, std::string>> sent;
  ddp::launch::Job::Wires wires;
  wires.send = [&](int client, const std::string& line) { sent.emplace_back(client, line); };
  wires.close = wires.watch = [](int) {};
  wires.remember = [](const Remembered&) {};
  wires.new_port = [] { return 1; };
  wires.say = [](const std::string&) {};
  wires.reached_at = [](int client) {
    return std::string(client == 0 ? "127.0.0.1" : "192.168.7.1");
  };
  ddp::launch::Job job(options, "t", wires, 0ms);
  for (const int client : {0, 1}) {
    const auto id = static_cast<ProcessId>(client + 1);
    job.on_line(0ms, client, line_of(MemberMessage(Hello{"t", id, -1, 100 + client, "h"})));
  }
  for (const int client : {0, 1}) job.on_line(0ms, client, "waits");
  std::vector<std::string> to_local, to_other;
  for (const auto& [client, line] : sent) (client == 0 ? to_local : to_other).push_back(line);
  REQUIRE(to_local.size() == 3);
  CHECK(to_local[1] == "reached 192.168.7.1");
  CHECK(to_local[2] == "form 1 0 0 1:0,2:1 -");
  CHECK(to_other.size() == 2);

  Member member({"t", 1, -1, 100, "h"}, 0ms);
  member.on_connected(0ms);
  for (const auto& line : to_local) {
    if (const auto read = message_of<CoordinatorMessage>(line)) member.on_message(0ms, *read);
  }
  CHECK(member.reached_at() == "192.168.7.1");
}

TEST_CASE("the job ends once all are done, and does not wait for ever for the last", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  job.say(0, Done{});
  SECTION("both are done") { job.say(1, Done{}); }
  SECTION("one is lost") { job.die(1); }
  SECTION("one trains on") {
    job.pass(599s, {0, 1});
    CHECK(!job.finish);
    job.pass(1s, {0, 1});
  }
  REQUIRE(job.finish);
  CHECK(job.finish->code == 0);
}

TEST_CASE("a rank that fails once all are done is named, and gives its exit code", "[pure]") {
  LaunchedJob job;
  job.begin();
  job.say(0ms, 0, "done");
  SECTION("it was done, too") { job.say(0ms, 1, "done"); }
  SECTION("it was in the last step") {}
  job.say(0ms, 9, "exited 1 101 137 0 was killed");
  CHECK(
      job.told.back() ==
      "say rank 1 (pid 101) was killed; the job is done, so no other one is started");
  CHECK(!job.exit_code());
  job.say(0ms, 9, "exited 0 100 0 0 ended");
  CHECK(job.told.back() == "finish 137 0 ");
  CHECK(job.exit_code() == 137);
}

TEST_CASE("user code that throws on all ranks ends the job with the first text", "[pure]") {
  Job job(limits_of(2, 1));
  job.begin(2);
  job.say(1, Threw{3, {"no such file"}});
  CHECK(!job.finish);
  job.say(0, Threw{3, {"no such folder"}});
  REQUIRE(job.finish);
  CHECK(job.finish->code == 1);
  CHECK(job.finish->why == "rank 1 threw: no such file");
}

TEST_CASE("random schedules of an elastic job keep every rule, and end", "[pure]") {
  int64_t generations = 0;
  int ended_well = 0;
  int started_again = 0;
  const int first = first_schedule();
  for (int i = first; i < first + schedules(); ++i) {
    Schedule schedule;
    schedule.seed = static_cast<uint64_t>(i) + 1;
    schedule.ranks = 2 + i % 4;
    schedule.min_ranks = i % 3 == 0 ? schedule.ranks : 1 + i % schedule.ranks;
    schedule.hosts = i % 2 == 1;
    schedule.restarts = i % 5 < 2;
    schedule.launched = i % 7 < 4;
    schedule.breaks = i % 11 < 5;
    const Outcome outcome = simulate(schedule);
    if (!outcome.error.empty()) FAIL(outcome.error);
    generations += outcome.generations;
    ended_well += outcome.code == 0;
    started_again += outcome.started_again;
  }
  INFO(
      generations << " generations, " << ended_well << " ended well, " << started_again
                  << " started again");
  // The schedules must reach what they are for.
  CHECK(generations > schedules());
  CHECK(ended_well > schedules() / 3);
}
