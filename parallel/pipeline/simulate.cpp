#include "pipeline/simulate.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace ddp {
namespace {

/// A kind of computation, a stage, and a micro-batch.
using Computation = std::tuple<char, int64_t, int64_t>;

std::string text_of(const Computation& computation) {
  const auto [kind, stage, microbatch] = computation;
  return action_text(kind, microbatch, stage);
}

/// The computation of another stage whose result `what` needs; kind 0: none, on the first stage
/// forward and the last one backward.
Computation input_of(const Computation& what, const PipelineShape& shape) {
  const auto [kind, stage, microbatch] = what;
  if (kind == 'F' && stage > 0) return {'F', stage - 1, microbatch};
  if (kind == 'B' && stage + 1 < shape.stages()) return {'B', stage + 1, microbatch};
  return {0, 0, 0};
}

class Simulation {
 public:
  Simulation(
      const PipelineShape& shape, const std::vector<std::vector<PipelineStep>>& steps,
      const PipelineCosts& costs)
      : shape_(shape), steps_(steps), costs_(costs), ranks_(steps.size()) {}

  PipelineRun run() {
    for (bool moved = true; moved && fault_.empty();) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size() && fault_.empty(); ++rank) {
        while (fault_.empty() && advance(rank)) moved = true;
      }
    }
    if (fault_.empty()) check_end();
    return result();
  }

 private:
  struct Message {
    Computation content;
    int64_t tag;
    double arrival;
  };
  struct RankState {
    size_t next = 0;  // index of a step
    double clock = 0;
    double busy = 0;
    int64_t live = 0;
    int64_t most_live = 0;
    bool sending = false;  // waits for the receiver
    std::set<Computation> done;
  };

  const PipelineStep& next_step(size_t rank) const { return steps_[rank][ranks_[rank].next]; }

  Computation computation_of(size_t rank, const PipelineAction& action) const {
    const auto stage = shape_.stage_of(static_cast<int64_t>(rank), action.chunk);
    return {action.kind, stage, action.microbatch};
  }

  std::deque<Message>& channel(int64_t from, int64_t to, char kind) {
    return channels_[{from, to, kind}];
  }

  void fail(size_t rank, const std::string& what) {
    fault_ = "rank " + std::to_string(rank) + ": " + what;
  }

  /// \return false where the rank has ended, or waits.
  bool advance(size_t rank) {
    auto& state = ranks_[rank];
    if (state.sending || state.next == steps_[rank].size()) return false;
    const auto& step = next_step(rank);
    const auto what = computation_of(rank, step.action);
    if (!is_possible(rank, step.action, what)) return true;
    if (!take_input(rank, step, what)) return false;
    compute(state, what);
    if (step.send) send(rank, *step.send, what);
    if (!state.sending) ++state.next;
    return true;
  }

  bool is_possible(size_t rank, const PipelineAction& action, const Computation& what) {
    const auto [kind, stage, microbatch] = what;
    const auto& done = ranks_[rank].done;
    if ((kind != 'F' && kind != 'B') || action.chunk < 0 || action.chunk >= shape_.chunks ||
        microbatch < 0 || microbatch >= shape_.microbatches) {
      fail(rank, text_of(what) + " is not in this pipeline");
    } else if (done.count(what) > 0) {
      fail(rank, text_of(what) + " comes twice");
    } else if (kind == 'B' && done.count({'F', stage, microbatch}) == 0) {
      fail(rank, text_of(what) + " comes before its forward");
    }
    return fault_.empty();
  }

  /// \return false where the rank waits for it.
  bool take_input(size_t rank, const PipelineStep& step, const Computation& what) {
    auto& state = ranks_[rank];
    const auto input = input_of(what, shape_);
    if (!step.receive) {
      if (std::get<0>(input) != 0 && state.done.count(input) == 0) {
        fail(rank, text_of(what) + " has no input");
      }
      return fault_.empty();
    }
    const auto from = step.receive->peer;
    auto& messages = channel(from, static_cast<int64_t>(rank), step.action.kind);
    if (messages.empty()) return false;
    const auto message = messages.front();
    messages.pop_front();
    if (message.content != input || message.tag != step.receive->tag) {
      fail(
          rank, text_of(what) + " receives " + text_of(message.content) + " with tag " +
                    std::to_string(message.tag));
      return false;
    }
    if (costs_.blocking_sends) {
      state.clock = std::max(state.clock + costs_.message, message.arrival);
      auto& sender = ranks_[static_cast<size_t>(from)];
      sender.clock = state.clock;
      sender.sending = false;
      ++sender.next;
    }
    state.clock = std::max(state.clock, message.arrival);
    return true;
  }

  void compute(RankState& state, const Computation& what) {
    const bool forward = std::get<0>(what) == 'F';
    const auto stage = static_cast<size_t>(std::get<1>(what));
    const auto weight = costs_.weights.empty() ? 1 : costs_.weights.at(stage);
    const auto cost = weight * (forward ? costs_.forward : costs_.backward);
    state.clock += cost;
    state.busy += cost;
    state.live += forward ? 1 : -1;
    state.most_live = std::max(state.most_live, state.live);
    state.done.insert(what);
  }

  void send(size_t rank, const PipelineMessage& message, const Computation& what) {
    auto& state = ranks_[rank];
    const auto from = static_cast<int64_t>(rank);
    auto& free = wires_[{from, message.peer}];
    free = std::max(free, state.clock) + costs_.message;
    channel(from, message.peer, std::get<0>(what)).push_back({what, message.tag, free});
    state.sending = costs_.blocking_sends;
    ++messages_;
  }

  void check_end() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto& state = ranks_[rank];
      if (state.next == steps_[rank].size()) continue;
      const auto what = text_of(computation_of(rank, next_step(rank).action));
      if (!fault_.empty()) fault_ += "; ";
      fault_ +=
          "rank " + std::to_string(rank) + (state.sending ? " sends " : " waits before ") + what;
    }
    const auto each = static_cast<size_t>(2 * shape_.chunks * shape_.microbatches);
    for (size_t rank = 0; rank < ranks_.size() && fault_.empty(); ++rank) {
      const auto count = ranks_[rank].done.size();
      if (count != each) {
        fail(rank, std::to_string(count) + " of " + std::to_string(each) + " computations");
      }
    }
    for (const auto& [between, messages] : channels_) {
      if (messages.empty() || !fault_.empty()) continue;
      fail(
          static_cast<size_t>(std::get<1>(between)),
          "never receives " + text_of(messages.front().content));
    }
  }

  PipelineRun result() const {
    PipelineRun run;
    run.fault = fault_;
    double busy = 0;
    for (const auto& state : ranks_) {
      run.time = std::max(run.time, state.clock);
      run.most_live.push_back(state.most_live);
      busy += state.busy;
    }
    if (run.time > 0) run.bubble = 1 - busy / (run.time * static_cast<double>(ranks_.size()));
    run.messages = messages_;
    return run;
  }

  const PipelineShape& shape_;
  const std::vector<std::vector<PipelineStep>>& steps_;
  const PipelineCosts& costs_;
  std::vector<RankState> ranks_;
  std::map<std::tuple<int64_t, int64_t, char>, std::deque<Message>> channels_;  // from, to, kind
  std::map<std::pair<int64_t, int64_t>, double> wires_;  // from, to: when the last message has left
  std::string fault_;
  int64_t messages_ = 0;
};

}  // namespace

PipelineRun simulate(
    const PipelineShape& shape, const std::vector<std::vector<PipelineStep>>& steps,
    const PipelineCosts& costs) {
  return Simulation(shape, steps, costs).run();
}

}  // namespace ddp
