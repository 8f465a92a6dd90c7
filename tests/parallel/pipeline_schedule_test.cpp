// The lists of pipelines, obeyed by a simulator; and that it sees wrong ones.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"

#include "support/catch.h"

namespace ddp {
namespace {

using Steps = std::vector<std::vector<PipelineStep>>;

constexpr auto kGPipe = PipelineSchedule::GPipe;
constexpr auto kOneFOneB = PipelineSchedule::OneFOneB;
constexpr auto kInterleaved = PipelineSchedule::Interleaved;

Steps steps_of(PipelineSchedule schedule, const PipelineShape& shape) {
  Steps steps;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    steps.push_back(pipeline_steps(pipeline_actions(schedule, shape, rank), shape, rank));
  }
  return steps;
}

PipelineRun run_of(
    PipelineSchedule schedule, const PipelineShape& shape, const PipelineCosts& costs = {}) {
  return simulate(shape, steps_of(schedule, shape), costs);
}

/// "F0 B0 F1 B1", or with chunks "F0.0 F0.1", where the chunk comes last.
std::string list_of(PipelineSchedule schedule, const PipelineShape& shape, int64_t rank) {
  std::string list;
  for (const auto& action : pipeline_actions(schedule, shape, rank)) {
    if (!list.empty()) list += ' ';
    list += action.kind + std::to_string(action.microbatch);
    if (shape.chunks > 1) list += '.' + std::to_string(action.chunk);
  }
  return list;
}

/// Calls `check` with every pipeline of at most 6 ranks, `most_chunks` and 12 micro-batches.
template <typename Check>
void for_each_shape(int64_t most_chunks, const Check& check) {
  for (int64_t ranks = 1; ranks <= 6; ++ranks) {
    for (int64_t chunks = 1; chunks <= most_chunks; ++chunks) {
      for (int64_t microbatches = 1; microbatches <= 12; ++microbatches) {
        CAPTURE(ranks, chunks, microbatches);
        check(PipelineShape{ranks, chunks, microbatches});
      }
    }
  }
}

/// Of a rank's time while the others fill or empty the pipeline: (P - 1) / (v m + P - 1), as the
/// papers have it; more with fewer micro-batches than ranks, where a rank waits in each chunk.
double least_bubble(const PipelineShape& shape) {
  const auto busy = shape.chunks * shape.microbatches;
  const auto waits = std::max<int64_t>(0, shape.ranks - shape.microbatches);
  const auto idle = shape.ranks - 1 + (shape.chunks - 1) * waits;
  return static_cast<double>(idle) / static_cast<double>(busy + idle);
}

/// A change of the lists of 1F1B on 2 ranks with 4 micro-batches, and what is then wrong.
struct Fault {
  std::string text;
  std::function<void(Steps&)> change;
};

void check_faults(const std::vector<Fault>& faults) {
  const PipelineShape shape{2, 1, 4};
  for (const auto& [text, change] : faults) {
    auto steps = steps_of(kOneFOneB, shape);
    change(steps);
    CHECK(simulate(shape, steps).fault == text);
  }
}

}  // namespace

TEST_CASE("a rank's list is the one of the papers", "[pipeline][pure]") {
  CHECK(list_of(kGPipe, {2, 1, 3}, 0) == "F0 F1 F2 B0 B1 B2");
  CHECK(list_of(kGPipe, {2, 2, 2}, 1) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0");
  CHECK(list_of(kOneFOneB, {2, 1, 4}, 0) == "F0 F1 B0 F2 B1 F3 B2 B3");
  CHECK(list_of(kOneFOneB, {2, 1, 4}, 1) == "F0 B0 F1 B1 F2 B2 F3 B3");
  CHECK(list_of(kOneFOneB, {4, 1, 2}, 0) == "F0 F1 B0 B1");
  CHECK(list_of(kOneFOneB, {4, 1, 1}, 2) == "F0 B0");
  CHECK(
      list_of(kInterleaved, {2, 2, 4}, 0) ==
      "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
  CHECK(
      list_of(kInterleaved, {2, 2, 4}, 1) ==
      "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0");
  // Five micro-batches do not make two equal rounds: the first has three.
  CHECK(
      list_of(kInterleaved, {2, 2, 5}, 1) ==
      "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F3.1 B2.0 F4.1 B3.1 "
      "B4.1 B3.0 B4.0");
}

TEST_CASE("GPipe computes each thing once, and keeps all micro-batches", "[pipeline][pure]") {
  for_each_shape(3, [](const PipelineShape& shape) {
    const auto run = run_of(kGPipe, shape);
    CHECK(run.fault == "");
    for (const auto live : run.most_live) CHECK(live == shape.chunks * shape.microbatches);
    CHECK(run.bubble == Approx(least_bubble(shape)).margin(1e-12));
  });
}

TEST_CASE("1F1B keeps as few micro-batches as there are stages left", "[pipeline][pure]") {
  for_each_shape(1, [](const PipelineShape& shape) {
    const auto run = run_of(kOneFOneB, shape);
    CHECK(run.fault == "");
    CHECK(run.bubble == Approx(least_bubble(shape)).margin(1e-12));
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      CAPTURE(rank);
      const auto expected = std::min(shape.microbatches, shape.ranks - rank);
      CHECK(run.most_live[static_cast<size_t>(rank)] == expected);
    }
  });
}

TEST_CASE("stages that are interleaved have a shorter idle time", "[pipeline][pure]") {
  for_each_shape(3, [](const PipelineShape& shape) {
    const auto run = run_of(kInterleaved, shape, PipelineCosts{1, 2});
    CHECK(run.fault == "");
    CHECK(run.bubble == Approx(least_bubble(shape)).margin(1e-12));
    const auto rounds = std::max<int64_t>(1, shape.microbatches / shape.ranks);
    const auto first_round = (shape.microbatches + rounds - 1) / rounds;
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      CAPTURE(rank);
      const auto ahead = (shape.chunks - 1) * first_round + 2 * (shape.ranks - 1 - rank);
      const auto expected = std::min(shape.chunks * shape.microbatches, ahead + 1);
      CHECK(run.most_live[static_cast<size_t>(rank)] == expected);
    }
  });
}

TEST_CASE("a boundary has two messages a micro-batch, with tags of their own", "[pipeline][pure]") {
  for (const auto schedule : {kGPipe, kInterleaved}) {
    for_each_shape(3, [&](const PipelineShape& shape) {
      const auto steps = steps_of(schedule, shape);
      const auto boundaries = shape.ranks == 1 ? 0 : shape.stages() - 1;
      CHECK(simulate(shape, steps).messages == 2 * shape.microbatches * boundaries);

      std::set<std::tuple<size_t, int64_t, int64_t>> tags;
      int64_t sends = 0;
      for (size_t rank = 0; rank < steps.size(); ++rank) {
        for (const auto& step : steps[rank]) {
          if (!step.send) continue;
          tags.insert({rank, step.send->peer, step.send->tag});
          ++sends;
        }
      }
      CHECK(static_cast<int64_t>(tags.size()) == sends);
    });
  }
}

TEST_CASE("the idle time is the papers'", "[pipeline][pure]") {
  CHECK(run_of(kOneFOneB, {2, 1, 8}).bubble == Approx(1.0 / 9));
  CHECK(run_of(kOneFOneB, {4, 1, 8}, {1, 2}).bubble == Approx(3.0 / 11));
  CHECK(run_of(kInterleaved, {4, 2, 8}, {1, 2}).bubble == Approx(3.0 / 19));
  CHECK(run_of(kInterleaved, {4, 2, 9}, {1, 2}).bubble == Approx(3.0 / 21));  // rounds of 5 and 4
}

TEST_CASE("messages take time", "[pipeline][pure]") {
  const PipelineShape shape{2, 1, 8};
  CHECK(run_of(kOneFOneB, shape).time == Approx(18));
  // GPipe sends all but the first forward and the last backward while others compute.
  CHECK(run_of(kGPipe, shape, {1, 1, 0.5}).time == Approx(19));
  CHECK(run_of(kGPipe, shape, {1, 1, 1}).time == Approx(20));
  CHECK(run_of(kGPipe, shape, {1, 1, 2}).time == Approx(2 * (1 + 8 * 2 + 1)));
  // In 1F1B a rank waits for a message in each turn. Interleaved, also of one chunk ("eager"), has
  // more forwards ahead: those hide the messages.
  CHECK(run_of(kOneFOneB, shape, {1, 1, 0.5}).time == Approx(18 + 4));
  CHECK(run_of(kInterleaved, shape, {1, 1, 0.5}).time == Approx(19));
  CHECK(run_of(kInterleaved, shape, {1, 2, 1}).time == Approx(27 + 2));
  CHECK(run_of(kInterleaved, {4, 1, 8}, {1, 2, 0.5}).time == Approx(33 + 2 * 3 * 0.5));
  // With two stages a rank activations and gradients of both ways share the wire.
  CHECK(run_of(kInterleaved, {2, 2, 8}, {0.5, 1, 2}).time >= 3 * 8 * 2);
  CHECK(run_of(kInterleaved, {2, 2, 8}, {0.5, 1, 1}).time == Approx(36));
}

TEST_CASE("ranks that wait for their sends wait for ever", "[pipeline][pure]") {
  PipelineCosts costs;
  costs.blocking_sends = true;
  CHECK(run_of(kGPipe, {2, 1, 4}, costs).fault == "");
  CHECK(run_of(kGPipe, {2, 1, 4}, costs).time > run_of(kGPipe, {2, 1, 4}).time - 1e-12);
  CHECK(
      run_of(kOneFOneB, {2, 1, 4}, costs).fault ==
      "rank 0 sends F1 of stage 0; rank 1 sends B0 of stage 1");
}

TEST_CASE("the simulator sees lists that lack or repeat something", "[pipeline][pure]") {
  check_faults({
      {"", [](Steps&) {}},
      {"rank 0: 7 of 8 computations", [](Steps& s) { s[0].pop_back(); }},
      {"rank 0: F0 of stage 0 comes twice", [](Steps& s) { s[0].push_back(s[0][0]); }},
      {"rank 1: F4 of stage 1 is not in this pipeline",
       [](Steps& s) { s[1][0].action.microbatch = 4; }},
      {"rank 1: F0 of stage 3 is not in this pipeline", [](Steps& s) { s[1][0].action.chunk = 1; }},
      {"rank 1: B0 of stage 1 comes before its forward",
       [](Steps& s) { std::swap(s[1][0], s[1][1]); }},
  });
}

TEST_CASE("the simulator sees messages that do not fit", "[pipeline][pure]") {
  check_faults({
      {"rank 1: F0 of stage 1 receives F1 of stage 0 with tag 2",
       [](Steps& s) { std::swap(s[0][0], s[0][1]); }},
      {"rank 1: F0 of stage 1 receives F1 of stage 0 with tag 0",
       [](Steps& s) { std::swap(s[0][0].action, s[0][1].action); }},
      {"rank 1: F0 of stage 1 receives F0 of stage 0 with tag 6",
       [](Steps& s) { s[0][0].send->tag = 6; }},
      {"rank 1: F0 of stage 1 has no input", [](Steps& s) { s[1][0].receive.reset(); }},
      {"rank 0 waits before B3 of stage 0", [](Steps& s) { s[1].back().send.reset(); }},
      {"rank 1: never receives B3 of stage 0",
       [](Steps& s) {
         s[0].back().send = PipelineMessage{1, 1};
       }},
  });
}

TEST_CASE("the simulator sees ranks that wait for each other", "[pipeline][pure]") {
  // Rank 0 waits for the first gradient before it sends micro-batch 1, without which rank 1, now of
  // another schedule, does not begin with backwards.
  check_faults({
      {"rank 0 waits before B0 of stage 0; rank 1 waits before F1 of stage 1",
       [](Steps& s) {
         std::swap(s[0][1], s[0][2]);
         s[1] = steps_of(kGPipe, {2, 1, 4})[1];
       }},
  });
  // Several stages a rank need more forwards ahead than one stage does.
  CHECK(run_of(kOneFOneB, {2, 2, 4}).fault == "rank 0: B0 of stage 2 comes before its forward");
}

TEST_CASE("an action says what it is", "[pipeline][pure]") {
  CHECK(text_of(PipelineAction{'B', 0, 2}, {2, 1, 4}, 1) == "B2 of stage 1");
  CHECK(text_of(PipelineAction{'F', 2, 11}, {4, 3, 12}, 1) == "F11 of stage 9");
}

}  // namespace ddp
