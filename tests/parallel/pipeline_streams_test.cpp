// The lists of pipelines, obeyed by ranks whose streams move one message at a time, as NCCL's do.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/pipeline/schedule.h"

#include "support/catch.h"

namespace ddp {
namespace {

using Routes = std::vector<MessageRoute>;

/// Two steps and an evaluation of each rank. A rank's host waits for what it receives, before a
/// backward for the activations that it sent, and at the end of a pass for all that it sent.
class StreamedRanks {
 public:
  /// \param routes  with a stream each; empty: one stream a rank.
  StreamedRanks(PipelineSchedule schedule, const PipelineShape& shape, const Routes& routes)
      : shape_(shape), routes_(routes), ranks_(static_cast<size_t>(shape.ranks)) {
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      const auto steps = pipeline_steps(pipeline_actions(schedule, shape, rank), shape, rank);
      for (const bool trains : {true, false, true}) {
        auto& all = state(rank).steps;
        for (const auto& step : steps) {
          if (trains || step.action.kind == 'F') all.push_back({step, false});
        }
        all.back().ends_pass = true;
      }
    }
  }

  /// What the ranks wait for in the end; empty if all have ended.
  std::string run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t rank = 0; rank < shape_.ranks; ++rank) {
        while (advance(rank)) moved = true;
      }
      while (deliver()) moved = true;
    }
    std::string waits;
    for (int64_t rank = 0; rank < shape_.ranks; ++rank) {
      const auto& own = state(rank);
      if (own.next == own.steps.size()) continue;
      if (!waits.empty()) waits += "; ";
      waits += "rank " + std::to_string(rank) + " waits in " +
               text_of(own.steps[own.next].step.action, shape_, rank);
    }
    return waits + wrong_;
  }

 private:
  using Content = std::tuple<char, int64_t, int64_t>;  // kind, sending stage, micro-batch

  /// A send or a receive on a stream.
  struct Call {
    bool sends;
    int64_t peer;
    Content content;
    bool is_over = false;
  };
  struct Listed {
    PipelineStep step;
    bool ends_pass;
  };
  struct RankState {
    std::vector<Listed> steps;
    size_t next = 0;
    int part = 0;  // of the step: to receive, to wait, to send, to wait for the end
    std::deque<Call> calls;
    std::map<MessageRoute, std::deque<Call*>> streams;
    Call* received = nullptr;
  };

  RankState& state(int64_t rank) { return ranks_[static_cast<size_t>(rank)]; }

  void call(int64_t rank, bool sends, const PipelineMessage& message, const Content& content) {
    auto& own = state(rank);
    own.calls.push_back({sends, message.peer, content});
    const auto route = sends ? route_of(std::get<0>(content), rank, message.peer)
                             : route_of(std::get<0>(content), message.peer, rank);
    own.streams[routes_.empty() ? MessageRoute() : route].push_back(&own.calls.back());
  }

  /// Whether sends up to that of `last` have ended; without one, whether all have.
  static bool have_arrived(const RankState& own, char kind, const Content* last) {
    for (const auto& call : own.calls) {
      if (!call.sends || (last && std::get<0>(call.content) != kind)) continue;
      if (!call.is_over) return false;
      if (last && call.content == *last) return true;
    }
    return true;
  }

  /// \return  false where the rank has ended, or waits.
  bool advance(int64_t rank) {
    auto& own = state(rank);
    if (own.next == own.steps.size()) return false;
    const auto& [step, ends_pass] = own.steps[own.next];
    const auto [kind, chunk, microbatch] = step.action;
    const auto stage = shape_.stage_of(rank, chunk);
    const Content activation{'F', stage, microbatch};
    switch (own.part) {
      case 0:
        own.received = nullptr;
        if (!step.receive) break;
        call(rank, false, *step.receive, {kind, kind == 'F' ? stage - 1 : stage + 1, microbatch});
        own.received = &own.calls.back();
        break;
      case 1:
        if (own.received && !own.received->is_over) return false;
        if (kind == 'B' && step.receive && !have_arrived(own, 'F', &activation)) return false;
        break;
      case 2:
        if (step.send) call(rank, true, *step.send, {kind, stage, microbatch});
        break;
      default:
        if (ends_pass) {
          if (!have_arrived(own, 0, nullptr)) return false;
          own.calls.clear();
        }
        ++own.next;
    }
    own.part = (own.part + 1) % 4;
    return true;
  }

  /// Moves a message whose send and receive are the first of their streams.
  bool deliver() {
    for (int64_t rank = 0; rank < shape_.ranks; ++rank) {
      for (auto& [route, stream] : state(rank).streams) {
        if (stream.empty() || !stream.front()->sends) continue;
        auto& other = state(stream.front()->peer).streams[route];
        if (other.empty() || other.front()->sends || other.front()->peer != rank) continue;
        if (other.front()->content != stream.front()->content) wrong_ = " another message";
        stream.front()->is_over = other.front()->is_over = true;
        stream.pop_front();
        other.pop_front();
        return true;
      }
    }
    return false;
  }

  const PipelineShape shape_;
  const Routes routes_;
  std::vector<RankState> ranks_;
  std::string wrong_;
};

/// Calls `check` with every schedule that a pipeline of 2 to 4 ranks, 1 or 2 stages a rank and 1 to
/// 8 micro-batches can have.
template <typename Check>
void for_each_pipeline(const Check& check) {
  for (int64_t ranks = 2; ranks <= 4; ++ranks) {
    for (int64_t chunks = 1; chunks <= 2; ++chunks) {
      for (int64_t microbatches = 1; microbatches <= 8; ++microbatches) {
        for (const auto schedule :
             {PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::Interleaved}) {
          if (schedule == PipelineSchedule::OneFOneB && chunks > 1) continue;
          CAPTURE(ranks, chunks, microbatches, static_cast<int>(schedule));
          check(schedule, PipelineShape{ranks, chunks, microbatches});
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("with a stream for each route no rank waits for ever", "[pipeline][pure]") {
  for_each_pipeline([](PipelineSchedule schedule, const PipelineShape& shape) {
    CHECK(StreamedRanks(schedule, shape, separate_routes(schedule, shape)).run() == "");
  });
}

TEST_CASE("with one stream for all routes ranks wait for each other", "[pipeline][pure]") {
  CHECK(
      StreamedRanks(PipelineSchedule::OneFOneB, {2, 1, 2}, {}).run() ==
      "rank 0 waits in B0 of stage 0; rank 1 waits in F1 of stage 1");
  for_each_pipeline([](PipelineSchedule schedule, const PipelineShape& shape) {
    const auto waits = StreamedRanks(schedule, shape, {}).run();
    if (schedule != PipelineSchedule::GPipe) CHECK((waits != "") == (shape.microbatches > 1));
    if (schedule == PipelineSchedule::GPipe && shape.chunks == 1) CHECK(waits == "");
  });
  CHECK(StreamedRanks(PipelineSchedule::GPipe, {2, 2, 2}, {}).run() != "");
}

TEST_CASE("a pipeline has as many streams as its messages have routes", "[pipeline][pure]") {
  const auto count = [](PipelineSchedule schedule, int64_t ranks, int64_t chunks) {
    return separate_routes(schedule, {ranks, chunks, 4}).size();
  };
  CHECK(count(PipelineSchedule::GPipe, 2, 1) == 0);
  CHECK(count(PipelineSchedule::GPipe, 2, 2) == 4);
  CHECK(count(PipelineSchedule::OneFOneB, 1, 1) == 0);
  CHECK(count(PipelineSchedule::OneFOneB, 4, 1) == 2);
  CHECK(count(PipelineSchedule::Interleaved, 4, 1) == 2);
  CHECK(count(PipelineSchedule::Interleaved, 4, 2) == 4);
}

}  // namespace ddp
