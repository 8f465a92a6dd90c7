// Steps by clocks, against times worked out by hand.
#include "launch/pretend/replay.h"

#include <string>
#include <vector>

#include "launch/pretend/costs.h"
#include "launch/pretend/report.h"
#include "launch/pretend/training_calls.h"
#include "launch/pretend/written_calls.h"

#include "support/catch.h"

using namespace ddp::launch;
using namespace ddp::testing;

namespace {

// A byte takes a microsecond between hosts, and a tenth within one; each message 100 us more.
constexpr Links kLinks{1e7, 1e6, 100e-6};

struct Run {
  Replay replay;
  std::vector<StepOfList> steps;
};

Run run_of(const std::vector<WrittenCalls>& written, const std::optional<Links>& links = kLinks) {
  std::vector<CallList> lists;
  for (const auto& one : written) lists.push_back(one.list());
  auto steps = last_whole_steps(lists);
  auto result = replay(lists, find_meetings(lists), steps, links);
  return {std::move(result), std::move(steps)};
}

double microseconds(double seconds) { return 1e6 * seconds; }

/// A step of one rank of a world, in which `body` computes and calls.
template <typename Body>
WrittenCalls a_step(int rank, int world_size, const Body& body, int ranks_a_host = 8) {
  WrittenCalls calls(rank, world_size, ranks_a_host);
  std::vector<int> all;
  for (int i = 0; i < world_size; ++i) all.push_back(i);
  calls.group("default_pg", "world", all);
  calls.step();
  body(calls);
  calls.step();
  return calls;
}

}  // namespace

TEST_CASE("collectives take what a ring takes", "[pure]") {
  const Way way{100e-6, 1e6};
  const auto of = [&](const std::string& kind, int64_t size) {
    return microseconds(seconds_of(kind, size, 1000, way));
  };
  CHECK(of("all_reduce", 4) == Approx(6 * 100 + 1500));
  CHECK(of("reduce_scatter", 4) == Approx(3 * 100 + 750));
  CHECK(of("all_to_all", 4) == Approx(3 * 100 + 750));
  CHECK(of("scatter", 4) == Approx(3 * 100 + 750));
  CHECK(of("all_gather", 4) == Approx(3 * 100 + 3000));
  CHECK(of("gather", 4) == Approx(3 * 100 + 3000));
  CHECK(of("broadcast", 4) == Approx(3 * 100 + 1000));
  CHECK(of("reduce", 4) == Approx(3 * 100 + 1000));
  CHECK(of("barrier", 4) == Approx(6 * 100));
  CHECK(of("send", 4) == Approx(100 + 1000));
  CHECK(of("recv", 4) == Approx(100 + 1000));
  for (const char* kind : {"all_reduce", "all_gather", "barrier"}) CHECK(of(kind, 1) == 0);
  // Twice as long as its halves.
  CHECK(
      seconds_of("all_reduce", 8, 4096, way) ==
      Approx(seconds_of("reduce_scatter", 8, 4096, way) + seconds_of("all_gather", 8, 512, way)));
}

TEST_CASE("a rank alone waits for its own calls", "[pure]") {
  // 10 us before the call, an all_reduce of 1000 bytes in a ring of 2 over hosts, 30 us after it.
  const auto run = run_of({a_step(
      0, 2,
      [](WrittenCalls& calls) {
        calls.call_and_wait(0, "all_reduce", 1000);
        calls.compute(30);
      },
      1)});
  CHECK(microseconds(run.replay.ranks[0].step_seconds) == Approx(10 + 2 * 100 + 1000 + 30));
  CHECK(run.replay.all_ended());
}

TEST_CASE("messages within a host have its rate", "[pure]") {
  const auto run = run_of(
      {a_step(0, 2, [](WrittenCalls& calls) { calls.call_and_wait(0, "all_reduce", 1000); })});
  CHECK(microseconds(run.replay.ranks[0].step_seconds) == Approx(10 + 2 * 100 + 100));
  // 4 hosts of 2: rank 2's neighbor is in its host, rank 4 is not.
  const auto to = [](int peer) {
    return run_of({a_step(
        2, 8, [&](WrittenCalls& calls) { calls.call_and_wait(0, "send", 1000, "", peer); }, 2)});
  };
  CHECK(microseconds(to(3).replay.ranks[0].step_seconds) == Approx(10 + 100 + 100));
  CHECK(microseconds(to(4).replay.ranks[0].step_seconds) == Approx(10 + 100 + 1000));
}

TEST_CASE("computation hides a call until the wait", "[pure]") {
  const auto run_with = [](int64_t computing) {
    return run_of({a_step(
        0, 2,
        [&](WrittenCalls& calls) {
          const int call = calls.call(0, "all_reduce", 1000);
          calls.compute(computing);
          calls.wait(call);
        },
        1)});
  };
  CHECK(microseconds(run_with(500).replay.ranks[0].step_seconds) == Approx(10 + 1200));
  CHECK(microseconds(run_with(5000).replay.ranks[0].step_seconds) == Approx(10 + 5000));
}

TEST_CASE("calls of one group queue, those of two run beside each other", "[pure]") {
  const auto run_with = [](bool has_two) {
    return run_of({a_step(
        0, 2,
        [&](WrittenCalls& calls) {
          const int other = calls.group("other", "dp", {0, 1});
          const int first = calls.call(0, "all_reduce", 1000);
          const int second = calls.call(has_two ? other : 0, "all_reduce", 1000);
          calls.wait(first);
          calls.wait(second);
        },
        1)});
  };
  CHECK(microseconds(run_with(false).replay.ranks[0].step_seconds) == Approx(10 + 2 * 1200));
  CHECK(microseconds(run_with(true).replay.ranks[0].step_seconds) == Approx(20 + 1200));
}

TEST_CASE("a call begins when its last rank comes", "[pure]") {
  const auto with = [](int64_t computing) {
    return [computing](WrittenCalls& calls) {
      calls.compute(computing);
      calls.call_and_wait(0, "all_reduce", 1000);
    };
  };
  const auto run = run_of({a_step(0, 2, with(0), 1), a_step(1, 2, with(700), 1)});
  for (const auto& rank : run.replay.ranks) {
    CHECK(microseconds(rank.step_seconds) == Approx(710 + 1200));
  }
}

TEST_CASE("a message begins when both of its ranks come", "[pure]") {
  const auto with = [](const char* kind, int64_t computing) {
    return [=](WrittenCalls& calls) {
      calls.compute(computing);
      calls.call_and_wait(0, kind, 1000, "", std::string(kind) == "send" ? 1 : 0);
    };
  };
  const auto late = run_of({a_step(0, 2, with("send", 500), 1), a_step(1, 2, with("recv", 0), 1)});
  CHECK(microseconds(late.replay.ranks[0].step_seconds) == Approx(510 + 1100));
  CHECK(microseconds(late.replay.ranks[1].step_seconds) == Approx(510 + 1100));
}

TEST_CASE("the longest chain counts calls that depend on each other", "[pure]") {
  const auto run = run_of({a_step(0, 4, [](WrittenCalls& calls) {
    const int other = calls.group("other", "dp", {0, 1});
    calls.call_and_wait(0, "all_reduce", 1000);             // 1, with 6 messages
    const int third = calls.call(other, "send", 8, "", 1);  // 2
    const int beside = calls.call(0, "barrier", 0);         // 2, with 12 messages
    calls.wait(beside);
    calls.wait(third);
    calls.call_and_wait(other, "all_gather", 8);  // 3, with 13 messages
  })});
  CHECK(run.replay.chain.calls == 3);
  CHECK(run.replay.chain.rounds == 13);
  const auto queued = run_of({a_step(0, 2, [](WrittenCalls& calls) {
    const int first = calls.call(0, "all_reduce", 8);
    const int second = calls.call(0, "all_reduce", 8);
    calls.wait(first);
    calls.wait(second);
  })});
  CHECK(queued.replay.chain.calls == 2);
  const auto without_links = run_of(
      {a_step(0, 4, [](WrittenCalls& calls) { calls.call_and_wait(0, "all_reduce", 1000); })},
      std::nullopt);
  CHECK(without_links.replay.chain.calls == 1);
}

TEST_CASE("a chain goes over ranks", "[pure]") {
  // Rank 0 sends to 1, that to 2: two calls after each other.
  const auto body = [](int rank) {
    return [rank](WrittenCalls& calls) {
      if (rank > 0) calls.call_and_wait(0, "recv", 8, "", rank - 1);
      if (rank < 2) calls.call_and_wait(0, "send", 8, "", rank + 1);
    };
  };
  const auto run = run_of({a_step(0, 3, body(0)), a_step(1, 3, body(1)), a_step(2, 3, body(2))});
  CHECK(run.replay.chain.calls == 2);
  CHECK(run.replay.all_ended());
}

TEST_CASE("the last whole step is measured, the same one on all ranks", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("default_pg", "world", {0, 1});
    for (int step = 0; step < 4 + rank; ++step) {
      calls.compute(7);
      calls.step();
      for (int i = 0; i <= step; ++i) calls.call_and_wait(group, "all_reduce", 4);
    }
    calls.call_and_wait(group, "barrier", 0);
    lists.push_back(calls.list());
  }
  const auto steps = last_whole_steps(lists);
  for (size_t i = 0; i < lists.size(); ++i) {
    CHECK(steps[i].number == 2);
    const auto calls = calls_by_kind(lists[i], steps[i]);
    REQUIRE(calls.size() == 1);
    CHECK(calls[0].axis == "world");
    CHECK(calls[0].kind == "all_reduce");
    CHECK(calls[0].ranks == 2);
    CHECK(calls[0].calls == 3);
    CHECK(calls[0].bytes == 12);
    CHECK(microseconds(seconds_of_computing(lists[i], steps[i])) == Approx(30 + 7));
  }
}

TEST_CASE("without a second step all up to the end counts, and without steps all", "[pure]") {
  WrittenCalls none(0, 2), one(0, 2);
  for (auto* calls : {&none, &one}) {
    const int group = calls->group("default_pg", "world", {0, 1});
    calls->call_and_wait(group, "broadcast", 4, "", 0);
    if (calls == &one) calls->step();
    calls->call_and_wait(group, "all_reduce", 4);
  }
  const auto calls_of = [](const WrittenCalls& written) {
    const std::vector<CallList> lists{written.list()};
    return calls_by_kind(lists[0], last_whole_steps(lists)[0]).size();
  };
  CHECK(calls_of(none) == 2);
  CHECK(calls_of(one) == 1);
}

TEST_CASE("pipelines, replicas and parts of layers end in the replay", "[pure]") {
  Training training{3, 2, 2, 2, 3, 3, true};
  std::vector<CallList> lists;
  for (int rank = 0; rank < training.size(); ++rank)
    lists.push_back(write_calls(training, rank).list());
  const auto report = make_report(lists, kLinks);
  CHECK(report.faults.empty());
  REQUIRE(report.step_seconds);
  // The last stage waits for three messages forward, the first one for three backward.
  CHECK(*report.step_seconds > 6 * 4196e-6);
  CHECK(report.chain.calls > 6);
}
