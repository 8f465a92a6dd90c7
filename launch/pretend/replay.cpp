#include "launch/pretend/replay.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/ranges.h>

#include "launch/pretend/costs.h"

namespace ddp::launch {
namespace {

Chain longer(const Chain& a, const Chain& b) {
  return {std::max(a.calls, b.calls), std::max(a.rounds, b.rounds)};
}

class Replaying {
 public:
  Replaying(
      const std::vector<CallList>& lists, const Meetings& meetings,
      const std::vector<StepOfList>& steps, const std::optional<Links>& links)
      : lists_(lists),
        meetings_(meetings),
        steps_(steps),
        links_(links),
        ranks_(lists.size()),
        states_(meetings.all.size()),
        lanes_(meetings.lanes) {
    result_.ranks.resize(lists.size());
    for (const auto& group : meetings.groups) {
      are_of_one_host_.push_back(all_of(
          group.ranks, [&](int rank) { return host_of(rank) == host_of(group.ranks.front()); }));
    }
  }

  Replay run() {
    for (size_t list = 0; list < lists_.size(); ++list) ready_.push_back(list);
    while (!ready_.empty()) {
      const auto list = ready_.back();
      ready_.pop_back();
      while (advance(list)) continue;
    }
    for (size_t list = 0; list < lists_.size(); ++list) {
      auto& rank = result_.ranks[list];
      rank.has_ended = ranks_[list].next == lists_[list].events.size();
      if (!rank.has_ended) rank.waits_for = lists_[list].events[ranks_[list].next].index;
      rank.made = ranks_[list].made;
      rank.step_seconds = ranks_[list].step_end - ranks_[list].step_begin;
    }
    for (const auto& state : states_) result_.has_met.push_back(state.has_ended);
    return std::move(result_);
  }

 private:
  struct Rank {
    size_t next = 0;  // event
    size_t made = 0;  // calls
    double clock = 0;
    bool has_computed = false;  // what comes before the next event
    double step_begin = 0, step_end = 0;
    Chain chain;  // up to what it waited for
  };
  struct State {
    size_t came = 0;
    double begin = 0, end = 0;
    Chain chain;  // up to it
    bool is_of_step = false;
    bool has_ended = false;
    std::vector<size_t> waiting;  // lists
  };
  struct Lane {
    double free = 0;
    Chain chain;
  };

  /// \return false where the rank has ended, or waits.
  bool advance(size_t list) {
    auto& rank = ranks_[list];
    const auto& events = lists_[list].events;
    if (rank.next == events.size()) return false;
    const auto& event = events[rank.next];
    if (!std::exchange(rank.has_computed, true)) rank.clock += event.computing;
    const auto& step = steps_[list];
    if (rank.next == step.begin) rank.step_begin = rank.clock;
    if (event.kind == ListedEvent::Kind::Wait && !take_wait(list, event.index)) return false;
    if (event.kind == ListedEvent::Kind::Call) {
      ++rank.made;
      come(list, event.index, step.has_event(rank.next));
    }
    if (rank.next <= step.end) rank.step_end = rank.clock;
    rank.has_computed = false;
    ++rank.next;
    return true;
  }

  bool take_wait(size_t list, size_t call) {
    auto& rank = ranks_[list];
    auto& state = states_[meetings_.of_calls[list][call]];
    if (!state.has_ended) {
      state.waiting.push_back(list);
      return false;
    }
    rank.clock = std::max(rank.clock, state.end);
    rank.chain = longer(rank.chain, state.chain);
    return true;
  }

  void come(size_t list, size_t call, bool is_of_step) {
    const auto id = meetings_.of_calls[list][call];
    const auto& meeting = meetings_.all[id];
    auto& state = states_[id];
    state.begin = std::max(state.begin, ranks_[list].clock);
    state.chain = longer(state.chain, ranks_[list].chain);
    state.is_of_step = state.is_of_step || is_of_step;
    if (++state.came == meeting.expected) finish(meeting, state);
  }

  void finish(const Meeting& meeting, State& state) {
    auto& lane = lanes_[meeting.lane];
    state.end = std::max(state.begin, lane.free) + seconds_of_meeting(meeting);
    state.chain = longer(state.chain, lane.chain);
    if (state.is_of_step) {
      const auto size = meetings_.groups[meeting.group].ranks.size();
      state.chain.calls += 1;
      state.chain.rounds += rounds_of(first_call(meeting).kind, static_cast<int64_t>(size));
      result_.chain = longer(result_.chain, state.chain);
    }
    state.has_ended = true;
    lane = {state.end, state.chain};
    for (const auto list : std::exchange(state.waiting, {})) ready_.push_back(list);
  }

  const ListedCall& call_at(const CallOfRank& at) const { return lists_[at.list].calls[at.call]; }
  const ListedCall& first_call(const Meeting& meeting) const {
    return call_at(meeting.calls.front());
  }

  double seconds_of_meeting(const Meeting& meeting) const {
    if (!links_) return 0;
    int64_t bytes = 0;
    for (const auto& at : meeting.calls) bytes = std::max(bytes, call_at(at).bytes);
    const auto& call = first_call(meeting);
    const auto& ranks = meetings_.groups[meeting.group].ranks;
    const auto way = way_of(*links_, is_one_host(meeting, call));
    return seconds_of(call.kind, static_cast<int64_t>(ranks.size()), bytes, way);
  }

  int host_of(int rank) const { return rank / lists_.front().ranks_a_host; }

  bool is_one_host(const Meeting& meeting, const ListedCall& call) const {
    if (!call.is_message() || call.peer < 0) return are_of_one_host_[meeting.group];
    const auto peer = meetings_.groups[meeting.group].ranks[static_cast<size_t>(call.peer)];
    return host_of(lists_[meeting.calls.front().list].rank) == host_of(peer);
  }

  const std::vector<CallList>& lists_;
  const Meetings& meetings_;
  const std::vector<StepOfList>& steps_;
  const std::optional<Links>& links_;
  Replay result_;
  std::vector<Rank> ranks_;    // by list
  std::vector<State> states_;  // by meeting
  std::vector<Lane> lanes_;
  std::vector<bool> are_of_one_host_;  // by group
  std::vector<size_t> ready_;          // lists that may go on
};

}  // namespace

bool Replay::all_ended() const {
  return all_of(ranks, [](const ReplayedRank& rank) { return rank.has_ended; });
}

Replay replay(
    const std::vector<CallList>& lists, const Meetings& meetings,
    const std::vector<StepOfList>& steps, const std::optional<Links>& links) {
  return Replaying(lists, meetings, steps, links).run();
}

}  // namespace ddp::launch
