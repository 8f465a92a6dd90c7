#include "launch/pretend/meetings.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <ddp/internal/rank_list.h>
#include <ddp/internal/text.h>

namespace ddp::launch {
namespace {

class Matching {
 public:
  explicit Matching(const std::vector<CallList>& lists) : lists_(lists) {
    for (size_t i = 0; i < lists.size(); ++i) place_of_[lists[i].rank] = i;
  }

  Meetings run() {
    for (size_t list = 0; list < lists_.size(); ++list) take_groups(list);
    for (size_t list = 0; list < lists_.size(); ++list) take_calls(list);
    result_.lanes = result_.groups.size();
    for (size_t group = 0; group < result_.groups.size(); ++group) meet_collectives(group);
    for (auto& [key, lane] : messages_) {
      if (takes_any_.count({lane.group, lane.to}) > 0) lane.both_are_present = false;
      match(lane);
      meet_messages(lane);
      result_.messages.push_back(lane);
    }
    return std::move(result_);
  }

 private:
  void take_groups(size_t list) {
    std::map<std::string, int> seen;
    auto& own = groups_of_.emplace_back();
    for (const auto& group : lists_[list].groups) {
      auto key = packed({group.name, group.axis, rank_list_text(group.ranks)});
      key += str(seen[key]++);
      const auto [found, is_new] = group_at_.try_emplace(key, result_.groups.size());
      if (is_new) add_group(group);
      own.push_back(found->second);
      if (auto* member = member_of(found->second, list)) member->has_group = true;
    }
  }

  void add_group(const ListedGroup& group) {
    MetGroup met{group.name, group.axis, group.ranks, {}};
    for (const int rank : group.ranks) {
      const auto place = place_of_.find(rank);
      if (place != place_of_.end()) met.members.push_back({place->second, false, {}});
    }
    std::sort(met.members.begin(), met.members.end(), [](const auto& a, const auto& b) {
      return a.list < b.list;
    });
    result_.groups.push_back(std::move(met));
  }

  void take_calls(size_t list) {
    const auto& calls = lists_[list].calls;
    result_.of_calls.emplace_back(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto group = groups_of_[list][calls[i].group];
      if (calls[i].is_message()) {
        take_message(list, i, group);
      } else if (auto* member = member_of(group, list)) {
        member->calls.push_back(i);
      }
    }
  }

  MetGroup::Member* member_of(size_t group, size_t list) {
    auto& members = result_.groups[group].members;
    const auto found = std::lower_bound(
        members.begin(), members.end(), list,
        [](const auto& member, size_t value) { return member.list < value; });
    return found != members.end() && found->list == list ? &*found : nullptr;
  }

  void take_message(size_t list, size_t index, size_t group) {
    const auto& call = lists_[list].calls[index];
    const int own = lists_[list].rank;
    const auto& ranks = result_.groups[group].ranks;
    const int peer = call.peer < 0 ? -1 : ranks[static_cast<size_t>(call.peer)];
    const int from = call.is_send() ? own : peer, to = call.is_send() ? peer : own;
    if (!call.is_send() && peer < 0) takes_any_.insert({group, own});
    auto& lane = messages_[{group, from, to, call.tag}];
    lane.group = group;
    lane.from = from;
    lane.to = to;
    lane.both_are_present = place_of_.count(from) > 0 && place_of_.count(to) > 0;
    (call.is_send() ? lane.sends : lane.receives).push_back({list, index});
  }

  void meet_collectives(size_t group) {
    const auto& members = result_.groups[group].members;
    size_t count = 0;
    for (const auto& member : members) count = std::max(count, member.calls.size());
    for (size_t number = 0; number < count; ++number) {
      Meeting meeting{group, group, number, members.size(), {}};
      for (const auto& member : members) {
        if (number < member.calls.size()) {
          meeting.calls.push_back({member.list, member.calls[number]});
        }
      }
      add_meeting(std::move(meeting), group);
    }
  }

  /// Brings sends and receives that meet to the same indices.
  void match(MessageLane& lane) const {
    std::map<std::pair<int64_t, std::string>, std::deque<CallOfRank>> waiting;
    for (const auto& receive : lane.receives) waiting[size_and_dtype(receive)].push_back(receive);
    MessageLane matched;
    std::vector<CallOfRank> other_sends;
    for (const auto& send : lane.sends) {
      auto& receives = waiting[size_and_dtype(send)];
      if (receives.empty()) {
        other_sends.push_back(send);
        continue;
      }
      matched.sends.push_back(send);
      matched.receives.push_back(receives.front());
      receives.pop_front();
    }
    std::vector<CallOfRank> other_receives;
    for (const auto& [key, receives] : waiting) {
      other_receives.insert(other_receives.end(), receives.begin(), receives.end());
    }
    std::sort(other_receives.begin(), other_receives.end(), [](const auto& a, const auto& b) {
      return a.call < b.call;
    });
    lane.sends = std::move(matched.sends);
    lane.receives = std::move(matched.receives);
    lane.sends.insert(lane.sends.end(), other_sends.begin(), other_sends.end());
    lane.receives.insert(lane.receives.end(), other_receives.begin(), other_receives.end());
  }

  std::pair<int64_t, std::string> size_and_dtype(const CallOfRank& at) const {
    const auto& call = lists_[at.list].calls[at.call];
    return {call.bytes, call.dtype};
  }

  void meet_messages(const MessageLane& lane) {
    const size_t wire =
        wires_.try_emplace({lane.group, lane.from, lane.to}, result_.lanes).first->second;
    result_.lanes = std::max(result_.lanes, wire + 1);
    const auto count = std::max(lane.sends.size(), lane.receives.size());
    for (size_t number = 0; number < count; ++number) {
      Meeting meeting{lane.group, wire, number, lane.both_are_present ? size_t{2} : 1, {}};
      for (const auto* side : {&lane.sends, &lane.receives}) {
        if (number < side->size()) meeting.calls.push_back((*side)[number]);
      }
      add_meeting(std::move(meeting), wire);
    }
  }

  void add_meeting(Meeting meeting, size_t lane) {
    meeting.lane = lane;
    for (const auto& [list, call] : meeting.calls) {
      result_.of_calls[list][call] = result_.all.size();
    }
    result_.all.push_back(std::move(meeting));
  }

  const std::vector<CallList>& lists_;
  Meetings result_;
  std::map<int, size_t> place_of_;              // by rank
  std::map<std::string, size_t> group_at_;      // by what names a group
  std::vector<std::vector<size_t>> groups_of_;  // by list and its groups
  std::map<std::tuple<size_t, int, int, int64_t>, MessageLane> messages_;
  std::set<std::pair<size_t, int>> takes_any_;            // group and rank
  std::map<std::tuple<size_t, int, int>, size_t> wires_;  // lanes by group, from, to
};

}  // namespace

Meetings find_meetings(const std::vector<CallList>& lists) { return Matching(lists).run(); }

}  // namespace ddp::launch
