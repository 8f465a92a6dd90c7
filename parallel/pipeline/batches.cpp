#include "pipeline/batches.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace ddp {
namespace {

/// When the actions of lists end, on a clock.
class ActionClock {
 public:
  ActionClock(const PipelineShape& shape, const std::vector<std::vector<PipelineStep>>& lists)
      : shape_(shape),
        lists_(lists),
        ends_(lists.size()),
        results_(static_cast<size_t>(2 * shape.stages() * shape.microbatches), kNever) {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < lists.size(); ++rank) {
        while (advance(rank)) moved = true;
      }
    }
  }

  /// By step of the rank's list.
  const std::vector<int64_t>& ends(int64_t rank) const { return ends_[static_cast<size_t>(rank)]; }

  /// When the message that a step of a rank receives is sent.
  int64_t arrival(int64_t rank, const PipelineAction& action) const {
    const auto stage = shape_.stage_of(rank, action.chunk);
    return result(action.kind, action.kind == 'F' ? stage - 1 : stage + 1, action.microbatch);
  }

 private:
  static constexpr int64_t kNever = -1;

  size_t place(char kind, int64_t stage, int64_t microbatch) const {
    const auto of_kind = kind == 'F' ? stage : shape_.stages() + stage;
    return static_cast<size_t>(of_kind * shape_.microbatches + microbatch);
  }
  int64_t result(char kind, int64_t stage, int64_t microbatch) const {
    return results_[place(kind, stage, microbatch)];
  }

  /// \return  false where the rank has ended, or waits.
  bool advance(size_t rank) {
    auto& ends = ends_[rank];
    if (ends.size() == lists_[rank].size()) return false;
    const auto& step = lists_[rank][ends.size()];
    const auto own_rank = static_cast<int64_t>(rank);
    auto begin = ends.empty() ? 0 : ends.back();
    if (step.receive) {
      const auto arrives = arrival(own_rank, step.action);
      if (arrives == kNever) return false;
      begin = std::max(begin, arrives);
    }
    const auto& [kind, chunk, microbatch] = step.action;
    ends.push_back(begin + (kind == 'F' ? 1 : 2));
    results_[place(kind, shape_.stage_of(own_rank, chunk), microbatch)] = ends.back();
    return true;
  }

  const PipelineShape& shape_;
  const std::vector<std::vector<PipelineStep>>& lists_;
  std::vector<std::vector<int64_t>> ends_;
  std::vector<int64_t> results_;  // by kind, stage and micro-batch: when it is there
};

}  // namespace

std::vector<PipelineBatch> pipeline_batches(
    const PipelineShape& shape, const std::vector<std::vector<PipelineStep>>& lists, int64_t rank) {
  const ActionClock clock(shape, lists);
  const auto& ends = clock.ends(rank);
  const auto& steps = lists[static_cast<size_t>(rank)];
  // A rank ends one action at a time, so that time and sender name a message.
  std::vector<std::tuple<int64_t, int64_t, BatchedMessage>> messages;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto& [action, receive, send] = steps[k];
    if (receive) {
      messages.push_back({clock.arrival(rank, action), receive->peer, {false, receive->peer, k}});
    }
    if (send) messages.push_back({ends[k], rank, {true, send->peer, k}});
  }
  std::sort(messages.begin(), messages.end(), [](const auto& one, const auto& other) {
    return std::tie(std::get<0>(one), std::get<1>(one)) <
           std::tie(std::get<0>(other), std::get<1>(other));
  });
  std::vector<PipelineBatch> batches;
  int64_t time = 0;  // no message is sent then
  for (const auto& [sent_at, sender, message] : messages) {
    if (sent_at != time) {
      time = sent_at;
      const auto after = std::upper_bound(ends.begin(), ends.end(), time);
      batches.push_back({static_cast<size_t>(after - ends.begin()), {}});
    }
    batches.back().messages.push_back(message);
  }
  return batches;
}

}  // namespace ddp
