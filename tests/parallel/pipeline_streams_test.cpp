// The batches of pipelines' messages, obeyed by ranks with one stream for all messages, as NCCL's
// communicators are.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel/pipeline/batches.h"
#include "parallel/pipeline/schedule.h"

#include "support/catch.h"

namespace ddp {
namespace {

using Lists = std::vector<std::vector<PipelineStep>>;
using Batches = std::vector<std::vector<PipelineBatch>>;  // by rank

Lists lists_of(PipelineSchedule schedule, const PipelineShape& shape, bool trains = true) {
  Lists lists;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    auto& own = lists.emplace_back();
    for (auto& step : pipeline_steps(pipeline_actions(schedule, shape, rank), shape, rank)) {
      if (trains || step.action.kind == 'F') own.push_back(step);
    }
  }
  return lists;
}

Batches batches_of(const PipelineShape& shape, const Lists& lists) {
  Batches batches;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    batches.push_back(pipeline_batches(shape, lists, rank));
  }
  return batches;
}

/// Each receive on its own, right before the action that needs it, and each send after its own.
Batches without_looking_ahead(const Lists& lists) {
  Batches batches;
  for (const auto& steps : lists) {
    auto& own = batches.emplace_back();
    for (size_t k = 0; k < steps.size(); ++k) {
      if (steps[k].receive) own.push_back({k, {{false, steps[k].receive->peer, k}}});
      if (steps[k].send) own.push_back({k + 1, {{true, steps[k].send->peer, k}}});
    }
  }
  return batches;
}

/// How a stream moves the messages of a batch: all at a time, as a group of NCCL's, or one after
/// the other.
enum class Moves { Together, OneByOne };

/// Ranks whose hosts queue everything, with a stream for computations and one for messages. A batch
/// begins after the one before it and the computations that were queued before it; a message moves
/// where both its ranks have it in a batch that has begun; a computation waits for its message.
class StreamedRanks {
 public:
  StreamedRanks(const Lists& lists, const Batches& batches, Moves moves)
      : lists_(lists), batches_(batches), moves_(moves), ranks_(lists.size()) {
    for (size_t rank = 0; rank < lists.size(); ++rank) begin_batch(rank);
  }

  /// What the ranks wait for in the end; empty if all have ended.
  std::string run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        while (compute(rank) || end_batch(rank)) moved = true;
        while (move_message(rank)) moved = true;
      }
    }
    std::string waits;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto& own = ranks_[rank];
      if (own.computed == lists_[rank].size() && own.batch == batches_[rank].size()) continue;
      waits += "rank " + std::to_string(rank) + " has " + std::to_string(own.computed) + " of " +
               std::to_string(lists_[rank].size()) + "; ";
    }
    return waits;
  }

  /// The most messages at a time that a rank has received before it needs them.
  size_t most_kept() const { return most_kept_; }
  /// Whether a message arrived while its rank computed something else that was before it.
  int64_t overlapped() const { return overlapped_; }

 private:
  struct RankState {
    size_t computed = 0;         // actions
    size_t batch = 0;            // that its stream is at
    std::vector<bool> is_moved;  // messages of the batch
    std::map<size_t, bool> received;
  };

  void begin_batch(size_t rank) {
    auto& own = ranks_[rank];
    own.is_moved.clear();
    if (own.batch < batches_[rank].size()) {
      own.is_moved.resize(batches_[rank][own.batch].messages.size());
    }
  }

  bool has_begun(size_t rank) const {
    const auto& own = ranks_[rank];
    return own.batch < batches_[rank].size() && own.computed >= batches_[rank][own.batch].before;
  }

  bool compute(size_t rank) {
    auto& own = ranks_[rank];
    if (own.computed == lists_[rank].size()) return false;
    if (lists_[rank][own.computed].receive && own.received.count(own.computed) == 0) return false;
    own.received.erase(own.computed++);
    return true;
  }

  bool end_batch(size_t rank) {
    auto& own = ranks_[rank];
    if (!has_begun(rank)) return false;
    if (std::count(own.is_moved.begin(), own.is_moved.end(), false) > 0) return false;
    // A message is there for a computation when its whole batch has ended.
    for (const auto& message : batches_[rank][own.batch].messages) {
      if (message.sends) continue;
      own.received[message.step] = true;
      overlapped_ += message.step > batches_[rank][own.batch].before ? 1 : 0;
    }
    most_kept_ = std::max(most_kept_, own.received.size());
    ++own.batch;
    begin_batch(rank);
    return true;
  }

  /// The messages of the batch that may move now.
  std::vector<size_t> movable(size_t rank) const {
    std::vector<size_t> movable;
    if (!has_begun(rank)) return movable;
    const auto& moved = ranks_[rank].is_moved;
    for (size_t i = 0; i < moved.size(); ++i) {
      if (moved[i]) continue;
      movable.push_back(i);
      if (moves_ == Moves::OneByOne) break;
    }
    return movable;
  }

  /// Moves a message that the rank sends. Messages from one rank to another have no tags: the first
  /// that is sent is the first that is received, and has to be the one that is expected.
  bool move_message(size_t rank) {
    for (const auto i : movable(rank)) {
      const auto& sent = batches_[rank][ranks_[rank].batch].messages[i];
      if (!sent.sends) continue;
      const auto peer = static_cast<size_t>(sent.peer);
      for (const auto j : movable(peer)) {
        const auto& received = batches_[peer][ranks_[peer].batch].messages[j];
        if (received.sends || received.peer != static_cast<int64_t>(rank)) continue;
        const auto& out = lists_[rank][sent.step];
        const auto& in = lists_[peer][received.step];
        if (out.action.kind != in.action.kind || out.send->tag != in.receive->tag) return false;
        ranks_[rank].is_moved[i] = ranks_[peer].is_moved[j] = true;
        return true;
      }
    }
    return false;
  }

  const Lists& lists_;
  const Batches& batches_;
  const Moves moves_;
  std::vector<RankState> ranks_;
  size_t most_kept_ = 0;
  int64_t overlapped_ = 0;
};

/// Calls `check` with every schedule that a pipeline of 2 to 8 ranks, 1 to 3 stages a rank and 1 to
/// 16 micro-batches can have.
void for_each_pipeline(const std::function<void(PipelineSchedule, const PipelineShape&)>& check) {
  for (int64_t ranks = 2; ranks <= 8; ++ranks) {
    for (int64_t chunks = 1; chunks <= 3; ++chunks) {
      for (const int64_t microbatches : {1, 2, 3, 4, 5, 7, 8, 11, 16}) {
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

TEST_CASE("in batches over one stream no rank waits for ever", "[pipeline][pure]") {
  for_each_pipeline([](PipelineSchedule schedule, const PipelineShape& shape) {
    for (const bool trains : {true, false}) {
      const auto lists = lists_of(schedule, shape, trains);
      const auto batches = batches_of(shape, lists);
      CHECK(StreamedRanks(lists, batches, Moves::Together).run() == "");
      CHECK(StreamedRanks(lists, batches, Moves::OneByOne).run() == "");
    }
  });
}

TEST_CASE("a rank that looks at its own list alone waits for ever", "[pipeline][pure]") {
  const auto waits = [](PipelineSchedule schedule, const PipelineShape& shape) {
    const auto lists = lists_of(schedule, shape);
    return StreamedRanks(lists, without_looking_ahead(lists), Moves::Together).run();
  };
  CHECK(waits(PipelineSchedule::OneFOneB, {2, 1, 2}) == "rank 0 has 2 of 4; rank 1 has 2 of 4; ");
  CHECK(waits(PipelineSchedule::Interleaved, {2, 2, 4}) != "");
  CHECK(waits(PipelineSchedule::GPipe, {2, 1, 4}) == "");
}

TEST_CASE("the ranks agree on the order and the partners of batches", "[pipeline][pure]") {
  for_each_pipeline([](PipelineSchedule schedule, const PipelineShape& shape) {
    const auto lists = lists_of(schedule, shape);
    const auto batches = batches_of(shape, lists);
    // From a rank to another, in order: kind, tag.
    using Order = std::vector<std::pair<char, int64_t>>;
    std::map<std::pair<int64_t, int64_t>, Order> sent, received;
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      const auto& own = lists[static_cast<size_t>(rank)];
      std::vector<int> seen(own.size());
      for (const auto& batch : batches[static_cast<size_t>(rank)]) {
        int sends = 0;
        for (const auto& message : batch.messages) {
          const auto& step = own[message.step];
          ++seen[message.step];
          if (message.sends) {
            ++sends;
            // Right after the action that made it.
            CHECK(batch.before == message.step + 1);
            sent[{rank, message.peer}].emplace_back(step.action.kind, step.send->tag);
          } else {
            CHECK(batch.before <= message.step);
            received[{message.peer, rank}].emplace_back(step.action.kind, step.receive->tag);
          }
        }
        CHECK(sends <= 1);
        CHECK(batch.messages.size() <= 3);
      }
      for (size_t k = 0; k < own.size(); ++k) {
        CHECK(seen[k] == (own[k].receive ? 1 : 0) + (own[k].send ? 1 : 0));
      }
    }
    CHECK(sent == received);
  });
}

TEST_CASE("messages arrive while ranks compute", "[pipeline][pure]") {
  const auto ahead = [](PipelineSchedule schedule, const PipelineShape& shape) {
    const auto lists = lists_of(schedule, shape);
    const auto batches = batches_of(shape, lists);
    StreamedRanks ranks(lists, batches, Moves::Together);
    CHECK(ranks.run() == "");
    return std::make_pair(ranks.overlapped(), ranks.most_kept());
  };
  // The last stage gets F1 while it computes B0.
  CHECK(ahead(PipelineSchedule::OneFOneB, {2, 1, 8}).first > 0);
  CHECK(ahead(PipelineSchedule::Interleaved, {4, 2, 8}).first > 0);
  // Few lie there at a time.
  CHECK(ahead(PipelineSchedule::OneFOneB, {8, 1, 16}).second <= 8);
}

}  // namespace ddp
