// What a change of members costs in a job of 1,024, by simulated links and by counts.
#include <chrono>

#include <ddp/internal/membership/reform.h>

#include "launch/membership_job.h"
#include "launch/simulator/links.h"
#include "support/catch.h"

using namespace ddp::testing;

namespace {

struct Costs {
  std::chrono::microseconds loss{0}, entry{0};
  int64_t bytes = 0;      // sent by the coordinator in both changes
  int64_t visits = 0;     // of peers, for messages
  int64_t looked_at = 0;  // peers, at most for a look at the time
};

/// A member is lost, and another one takes its slot.
Costs change_one(LinkedJob& job, int ranks) {
  Costs costs;
  const auto visited = job.visits();
  job.lose(ranks / 2);
  costs.loss = job.settle();
  costs.bytes = job.bytes_sent();
  CHECK(job.members() == ranks - 1);
  job.join(ranks / 2);
  costs.entry = job.settle();
  costs.bytes += job.bytes_sent();
  costs.visits = job.visits() - visited;
  costs.looked_at = job.most_looked_at();
  CHECK(job.members() == ranks);
  return costs;
}

Costs costs_at(int ranks, const Links& links) {
  LinkedJob job(ranks, links);
  job.settle();
  return change_one(job, ranks);
}

}  // namespace

TEST_CASE("a change of 1,024 members takes less than 2 s of links of 1 Gbit/s", "[pure]") {
  const auto costs = costs_at(1024, {});
  CAPTURE(costs.loss.count(), costs.entry.count(), costs.bytes, costs.visits);
  CHECK(costs.loss < 2s);
  CHECK(costs.entry < 2s);
}

TEST_CASE("what a change costs the coordinator is linear in the members", "[pure]") {
  for (const int ranks : {64, 256, 1024}) {
    const auto costs = costs_at(ranks, {});
    CAPTURE(ranks, costs.bytes, costs.visits, costs.looked_at);
    CHECK(costs.bytes < 1000 * ranks);
    CHECK(costs.visits < 100 * ranks);
    CHECK(costs.looked_at <= 2 * ranks);
  }
}

TEST_CASE("the messages of a change that wait for each other grow with the logarithm", "[pure]") {
  Links only_latency;
  only_latency.bytes_per_us = 0;
  const auto trips = [&](int ranks) {
    const auto costs = costs_at(ranks, only_latency);
    return std::make_pair(costs.loss / only_latency.latency, costs.entry / only_latency.latency);
  };
  const auto few = trips(16);
  const auto many = trips(1024);
  CAPTURE(few, many);
  CHECK(many.first == few.first + 6);  // log2(1024) - log2(16), of the ranks among themselves
  CHECK(many.second == few.second + 6);
}

TEST_CASE("a form is told as what has changed, to members that have the one before", "[pure]") {
  Job job(limits_of(4, 3));
  job.begin(4);
  CHECK(job.forms == 4);
  CHECK(job.reforms == 0);
  job.die(1);
  job.report({0, 2, 3}, 5);
  CHECK(job.reforms == 3);
  CHECK(job.slots() == std::vector<int>{0, 2, 3});
  CHECK(job.form.sources == std::vector<ProcessId>{1, 3, 4});
  CHECK(job.form.applied == 5);

  SECTION("a new process is told all") {
    job.enter({0, 2, 3});
    job.hello(5, 1);
    job.say(5, Waits{});
    for (const int process : {0, 2, 3}) job.say(process, Pauses{job.form.generation});
    job.report({0, 2}, 6);
    job.say(3, Report{job.gather.generation, 4, 0, Holding::Whole, job.form.generation});
    CHECK(job.forms == 5);
    CHECK(job.reforms == 6);
    CHECK(job.slots() == std::vector<int>{0, 1, 2, 3});
    CHECK(job.form.sources == std::vector<ProcessId>{1, 3});
  }
  SECTION("and one that has not got the last form") {
    job.die(2);
    const auto generation = job.gather.generation;
    job.hello(5, 1);
    job.say(5, Waits{});
    job.say(0, Report{generation, 5, 0, Holding::Whole, job.form.generation});
    job.say(3, Report{generation, 5, 0, Holding::Whole, 1});
    CHECK(job.reforms == 4);
    CHECK(job.forms == 6);
  }
}

TEST_CASE("a change of a form leads from one to the other", "[pure]") {
  const Form before{3, 10, 1, {{7, 0}, {8, 1}, {9, 2}}, {7, 8, 9}};
  for (const Form& after :
       {Form{4, 11, 1, {{7, 0}, {9, 2}}, {7, 9}}, Form{4, 11, 1, {{7, 0}, {6, 1}, {9, 2}}, {9}},
        Form{5, 0, 0, {{5, 0}, {8, 1}}, {}}, before}) {
    const auto change = change_of(before, after);
    const auto line = line_of(CoordinatorMessage(change));
    const auto read = std::get<Reform>(*message_of<CoordinatorMessage>(line));
    const auto again = ddp::membership::apply(read, before);
    REQUIRE(again);
    CHECK(line_of(CoordinatorMessage(*again)) == line_of(CoordinatorMessage(after)));
    CHECK(!ddp::membership::apply(read, Form{}));
  }
}
