// Which lines a job takes of which clients, and hosts of an elastic job that leave.
#include <map>
#include <string>
#include <vector>

#include "launch/told.h"
#include "support/catch.h"

using ddp::testing::Lines;
using ddp::testing::Told;
using namespace std::chrono_literals;

namespace {

ddp::launch::LaunchOptions options_of_elastic_hosts(int nodes) {
  auto options = Told::options(nodes, /*restarts=*/5, /*port=*/0);
  options.elastic.emplace();
  options.elastic->max_ranks = 2 * nodes;
  options.elastic->min_ranks = 1;
  return options;
}

std::string host_line(int node) { return "host t 1 " + std::to_string(node) + " 2 2 5 0"; }

std::string hello_line(int rank, int pid) {
  const auto process = std::to_string(pid);
  return "hello t " + process + " " + std::to_string(rank) + " " + process + " h";
}

/// A member's connection has its process's pid as its name.
struct TrainingJob {
  TrainingJob() : job(options_of_elastic_hosts(2)) {
    for (const int node : {0, 1}) job.say(1 + node, host_line(node));
    for (int rank = 0; rank < 4; ++rank) start(rank, 10 + rank);
    for (const int member : {10, 11, 12, 13}) job.say(member, "waits");
    enter({10, 11, 12, 13}, "1");
  }

  void started(int rank, int pid) {
    job.say(1 + rank / 2, "started " + std::to_string(rank) + " " + std::to_string(pid));
  }
  void start(int rank, int pid) {
    started(rank, pid);
    job.say(pid, hello_line(rank, pid));
  }
  void enter(const std::vector<int>& members, const std::string& generation) {
    for (const int member : members) job.say(member, "met " + generation);
    for (const int member : members) job.say(member, "entered " + generation);
    forget();
  }
  void go_on(const std::vector<int>& members, const std::string& generation) {
    for (const int member : members) job.say(member, "report " + generation + " 7 0 1 0");
    enter(members, generation);
  }
  /// Rank 3's process is gone, and its host is asked for another one.
  void lose_rank_3() {
    job.say(2, "exited 3 13 9 0 was killed by signal 9 (SIGKILL)");
    CHECK(job.to(2).back() == "replace 3 1 101");
    go_on({10, 11, 12}, "2");
  }
  void forget() {
    for (int client = 0; client < 30; ++client) job.to(client);
  }

  Told job;
};

/// The kind of client that the job counts it as now.
std::string kind_of(Told& job, int client) {
  if (job.is_launcher(client)) return "launcher";
  if (!job.closed.empty()) return "closed";
  job.to(client);
  job.say(client, "alive");
  return job.to(client) == Lines{"alive"} ? "member" : "none";
}

}  // namespace

TEST_CASE("a client stays what its first line says, and no line of another kind counts", "[pure]") {
  const std::string hello = hello_line(1, 30), back = "back t 30 1 30 h 0 0";
  const std::string host = host_line(1);
  // Rank 0's process.
  const Lines launchers_lines = {
      "started 0 99", "exited 0 10 9 0 exited with code 9", "gone", "signal 2", "notice 10", "bye"};
  const Lines members_lines = {"alive",     "waits", "report 1 5 0 1 0", "lost 1 - why",
                               "threw 5 x", "met 1", "entered 1",        "pauses 1",
                               "leaves",    "done",  "store 1 h:1"};
  const Lines others = {"", "GET / HTTP/1.1", "host", "hello t", "hello other 30 1 30 h"};
  std::map<std::string, std::map<std::string, std::string>> expected;
  for (const auto& line : launchers_lines)
    expected[line] = {{"new", "closed"}, {"member", "closed"}};
  for (const auto& line : members_lines)
    expected[line] = {{"new", "closed"}, {"launcher", "launcher"}};
  for (const auto& line : others) {
    expected[line] = {{"new", "closed"}, {"launcher", "launcher"}, {"member", "closed"}};
  }
  expected[host] = {{"new", "launcher"}, {"launcher", "launcher"}, {"member", "closed"}};
  for (const auto& line : {hello, back}) {
    expected[line] = {{"new", "member"}, {"launcher", "launcher"}, {"member", "member"}};
  }

  const std::map<std::string, std::string> first_lines = {
      {"new", ""}, {"launcher", host}, {"member", hello}};
  for (const auto& [line, kinds] : expected) {
    for (const auto& [kind, becomes] : kinds) {
      CAPTURE(line, kind);
      Told job(options_of_elastic_hosts(2));
      job.say(1, host_line(0));
      job.say(1, "started 0 10");
      if (kind != "new") job.say(20, first_lines.at(kind));
      job.to(1);
      job.to(20);
      job.say(20, line);
      const auto answer = job.to(20);
      CHECK(job.to(1).empty());
      CHECK(!job.exit_code());
      if (becomes == "closed" || kind == "launcher") CHECK(answer.empty());
      CHECK(kind_of(job, 20) == becomes);
    }
  }
}

TEST_CASE("lines that a client sent before its connection was closed are dropped", "[pure]") {
  Told job(options_of_elastic_hosts(2));
  job.say(1, host_line(0));
  job.say(1, "started 0 10");
  job.say(20, hello_line(0, 10));
  job.to(1);
  SECTION("of a stranger") { job.say(9, "GET / HTTP/1.1"); }
  SECTION("of a second process with a slot") { job.say(9, hello_line(0, 11)); }
  SECTION("of a launcher that was refused") { job.say(9, "host t 0 1 2 2 5 0"); }
  SECTION("of another job's launcher") { job.say(9, "host other 1 1 2 2 5 0"); }
  REQUIRE(job.closed == std::vector<int>{9});
  job.to(9);
  for (const auto& line : {host_line(1), hello_line(1, 11), std::string("alive")}) {
    CAPTURE(line);
    job.say(9, line);
    CHECK(!job.is_launcher(9));
    CHECK(job.to(9).empty());
  }
  job.say(9, "signal 2");
  job.lose(9);
  CHECK(job.closed == std::vector<int>{9});
  CHECK(job.to(1).empty());
  CHECK(!job.exit_code());
}

TEST_CASE("the lines of a member whose attempt was ended make it no launcher", "[pure]") {
  Told job(options_of_elastic_hosts(1));
  job.say(1, "host t 1 0 1 2 5 0");
  for (const int rank : {0, 1}) {
    job.say(1, "started " + std::to_string(rank) + " " + std::to_string(10 + rank));
    job.say(10 + rank, hello_line(rank, 10 + rank));
  }
  job.say(1, "exited 0 10 9 0 exited with code 9");
  REQUIRE(job.to(1).back() == "stop");
  job.say(11, host_line(0));
  CHECK(!job.is_launcher(11));
  job.say(1, "gone");
  CHECK(job.to(1).back() == "start 1 102");
}

TEST_CASE("a rank that says hello after SIGTERM to its host leaves at once", "[pure]") {
  TrainingJob training;
  Told& job = training.job;
  training.lose_rank_3();
  training.started(3, 23);
  job.say(2, "signal 15");
  CHECK(job.to(12) == Lines{"change"});
  const Lines let_go = {"end 0 this process left"};
  SECTION("its first line is hello") {
    job.say(23, hello_line(3, 23));
    CHECK(Lines{job.to(23).back()} == let_go);
  }
  SECTION("its connection was lost before that line was read") {
    job.say(24, "back t 23 3 23 h 0 0");
    CHECK(Lines{job.to(24).back()} == let_go);
  }
  CHECK(job.closed.size() == 2);  // the process before, and this one
  training.forget();
  job.say(2, "exited 3 23 0 1 exited with code 0");
  CHECK(job.to(2).empty());

  for (const int member : {10, 11, 12}) job.say(member, "pauses 2");
  for (const int member : {10, 11, 12}) job.say(member, "report 3 8 0 1 0");
  CHECK(job.to(12).back() == let_go.front());
  training.enter({10, 11}, "3");
  job.say(2, "exited 2 12 0 1 exited with code 0");
  job.say(2, "bye");
  CHECK(!job.exit_code());
  for (const int member : {10, 11}) job.say(member, "done");
  for (const int rank : {0, 1}) {
    job.say(1, "exited " + std::to_string(rank) + " 1" + std::to_string(rank) + " 0 0 exited");
  }
  CHECK(job.to(1).back() == "finish 0 0 ");
  CHECK(job.exit_code() == 0);
}

TEST_CASE("a rank of a host that left and came back stays", "[pure]") {
  TrainingJob training;
  Told& job = training.job;
  job.say(2, "signal 15");
  for (const int member : {10, 11, 12, 13}) job.say(member, "pauses 1");
  for (const int member : {10, 11, 12, 13}) job.say(member, "report 2 8 0 1 0");
  training.enter({10, 11}, "2");
  for (const int rank : {2, 3}) {
    job.say(2, "exited " + std::to_string(rank) + " 1" + std::to_string(rank) + " 0 1 exited");
  }
  job.say(2, "bye");
  job.lose(2);
  training.forget();

  job.say(3, host_line(1));
  CHECK(job.to(3) == Lines{"start 0 101"});
  // The coordinator reads members before launchers.
  job.say(22, hello_line(2, 22));
  job.say(3, "started 2 22");
  job.say(22, "waits");
  CHECK(job.to(22) == Lines{"you 2 4 1 10000 600000"});
  CHECK(job.to(10) == Lines{"change"});
}

TEST_CASE("a rank that could not be started is not tried again where its host leaves", "[pure]") {
  TrainingJob training;
  Told& job = training.job;
  training.lose_rank_3();
  job.say(2, "signal 15");
  job.say(2, "exited 3 0 1 0 could not be started: Cannot allocate memory");
  const auto lines = job.to(2);
  REQUIRE(lines.size() == 1);
  CHECK(lines.front() == "say rank 3 could not be started: Cannot allocate memory");
}
