#include "launch/pretend/order_check.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/pretend/call_words.h"
#include "launch/pretend/rank_list.h"

namespace ddp::launch {
namespace {

using Kind = OrderFault::Kind;

// How many calls after a difference have to fit, where a rank is said to have left one out.
constexpr size_t kFollowing = 8;

constexpr const char* kRemedy =
    "Call the same collectives with tensors of equal sizes and dtypes in the same order on all "
    "ranks.";

using Members = std::vector<const MetGroup::Member*>;

/// Compares the collectives of one group.
class GroupCheck {
 public:
  GroupCheck(
      const std::vector<CallList>& lists, const std::vector<std::vector<bool>>& waited,
      const MetGroup& group)
      : lists_(lists), waited_(waited), group_(group) {}

  std::optional<OrderFault> run() const {
    if (auto fault = missing_group()) return fault;
    size_t count = 0;
    for (const auto& member : group_.members) count = std::max(count, member.calls.size());
    for (size_t number = 0; number < count; ++number) {
      if (auto fault = difference_at(number)) return fault;
      if (auto fault = missing_call(number)) return fault;
      if (auto fault = never_waited(number)) return fault;
    }
    return std::nullopt;
  }

 private:
  const CallList& list_of(const MetGroup::Member& member) const { return lists_[member.list]; }
  int rank_of(const MetGroup::Member& member) const { return list_of(member).rank; }
  const ListedCall& call_of(const MetGroup::Member& member, size_t number) const {
    return list_of(member).calls[member.calls[number]];
  }
  static bool has(const MetGroup::Member& member, size_t number) {
    return number < member.calls.size();
  }

  std::string group_text_of() const { return group_text(group_.name, group_.axis, group_.ranks); }
  std::string call_text_of(const MetGroup::Member& member, size_t number) const {
    return call_text(list_of(member), call_of(member, number));
  }
  std::vector<int> ranks_of(const Members& members) const {
    std::vector<int> ranks;
    for (const auto* member : members) ranks.push_back(rank_of(*member));
    return ranks;
  }
  std::string text_of(const Members& members) const { return short_ranks_text(ranks_of(members)); }

  OrderFault fault(
      Kind kind, const Members& odd, const MetGroup::Member& at, size_t number,
      const std::string& text) const {
    const auto& call = call_of(at, number);
    return {kind, ranks_of(odd), group_.name, call.place, call.step, text};
  }

  std::optional<OrderFault> missing_group() const {
    Members with, without;
    const MetGroup::Member* caller = nullptr;
    for (const auto& member : group_.members) {
      if (member.has_group) with.push_back(&member);
      if (!member.has_group && list_of(member).is_complete) without.push_back(&member);
      if (caller == nullptr && !member.calls.empty()) caller = &member;
    }
    if (without.empty() || caller == nullptr) return std::nullopt;
    return fault(
        Kind::MissingGroup, with.size() < without.size() ? with : without, *caller, 0,
        str(group_text_of(), ": expected every rank of it to make it, but ", text_of(without),
            without.size() == 1 ? " does" : " do", " not, and rank ", rank_of(*caller), " called ",
            call_text_of(*caller, 0), " in it", others_of(*without.front()),
            ". Make the same groups and meshes in the same order on all ranks."));
  }

  /// The groups that a rank has in the place of this one.
  std::string others_of(const MetGroup::Member& without) const {
    std::string text;
    for (const auto& other : list_of(without).groups) {
      if (other.axis != group_.axis || other.axis == "group") continue;
      text +=
          str(text.empty() ? str("; rank ", rank_of(without), " has ") : " and ",
              group_text(other.name, other.axis, other.ranks));
    }
    return text;
  }

  using Signature = std::tuple<std::string, std::string, int64_t, int>;

  /// The parts of a call that all ranks have to agree on.
  Signature signature(const ListedCall& call, bool has_dtypes) const {
    return {
        call.kind, has_dtypes ? call.dtype : "-", has_equal_bytes(call.kind) ? call.bytes : 0,
        has_root(call.kind) ? call.peer : -1};
  }

  Kind kind_of(const Signature& a, const Signature& b) const {
    if (std::get<0>(a) != std::get<0>(b)) return Kind::OtherKind;
    if (std::get<1>(a) != std::get<1>(b)) return Kind::OtherDtype;
    return std::get<2>(a) != std::get<2>(b) ? Kind::OtherSize : Kind::OtherRoot;
  }

  std::optional<OrderFault> difference_at(size_t number) const {
    bool has_dtypes = true;
    for (const auto& member : group_.members) {
      if (has(member, number)) has_dtypes = has_dtypes && call_of(member, number).dtype != "-";
    }
    std::vector<std::pair<Signature, Members>> sides;  // the first one has the lowest rank
    for (const auto& member : group_.members) {
      if (!has(member, number)) continue;
      const auto own = signature(call_of(member, number), has_dtypes);
      const auto side = find_if(sides, [&](const auto& one) { return one.first == own; });
      if (side != sides.end()) {
        side->second.push_back(&member);
      } else {
        sides.push_back({own, {&member}});
      }
    }
    if (sides.size() < 2) return std::nullopt;
    // The side of most ranks is taken for right.
    std::stable_sort(sides.begin(), sides.end(), [](const auto& a, const auto& b) {
      return a.second.size() > b.second.size();
    });
    const auto& most = *sides[0].second.front();
    const auto& odd = *sides[1].second.front();
    Members all_odd;
    std::string others;
    for (size_t i = 1; i < sides.size(); ++i) {
      const auto& members = sides[i].second;
      all_odd.insert(all_odd.end(), members.begin(), members.end());
      others +=
          str(i + 1 < sides.size() ? ", " : " and ", text_of(members), " ",
              call_text_of(*members.front(), number));
    }
    auto kind = kind_of(sides[0].first, sides[1].first);
    const auto shift = shift_of(most, odd, number, kind);
    return fault(
        kind, all_odd, odd, number,
        str(group_text_of(), ": expected every rank to call the same collective number ", number,
            ", but ", text_of(sides[0].second), " called ", call_text_of(most, number), others,
            shift, ". ", kRemedy));
  }

  bool fit(const MetGroup::Member& a, size_t number_a, const MetGroup::Member& b, size_t number_b)
      const {
    return signature(call_of(a, number_a), true) == signature(call_of(b, number_b), true);
  }

  /// Whether the calls of both from those numbers on are the same for a while.
  bool go_on(
      const MetGroup::Member& a, size_t from_a, const MetGroup::Member& b, size_t from_b) const {
    size_t i = 0;
    while (i < kFollowing && has(a, from_a + i) && has(b, from_b + i)) {
      if (!fit(a, from_a + i, b, from_b + i)) return false;
      ++i;
    }
    return i > 0;
  }

  /// How the order of one rank became another one, where that shows.
  std::string shift_of(
      const MetGroup::Member& most, const MetGroup::Member& odd, size_t number, Kind& kind) const {
    const auto rank = str("; rank ", rank_of(odd));
    if (odd.calls.size() < most.calls.size() && go_on(most, number + 1, odd, number)) {
      kind = Kind::MissingCall;
      return rank + " leaves that one out, and calls what follows";
    }
    if (odd.calls.size() > most.calls.size() && go_on(most, number, odd, number + 1)) {
      kind = Kind::ExtraCall;
      return rank + " calls one more, and then what the others call";
    }
    const bool has_next = has(most, number + 1) && has(odd, number + 1);
    if (has_next && fit(most, number, odd, number + 1) && fit(most, number + 1, odd, number)) {
      return rank + " calls two of them in the other order";
    }
    return "";
  }

  std::optional<OrderFault> missing_call(size_t number) const {
    Members with, without;
    for (const auto& member : group_.members) {
      if (has(member, number)) {
        with.push_back(&member);
      } else if (list_of(member).is_complete) {
        without.push_back(&member);
      }
    }
    if (with.empty() || without.empty()) return std::nullopt;
    const auto& more = *with.front();
    const auto& fewer = *without.front();
    const bool is_extra = with.size() < without.size();
    const auto parted = first_other_place(more, fewer, number);
    const auto text =
        str(group_text_of(), ": expected every rank to call collective number ", number, ", but ",
            text_of(with), " called ", call_text_of(more, number), " and ", text_of(without),
            without.size() == 1 ? " ends" : " end", " after ", number, " calls",
            parted ? str(". Their calls are at other places from number ", *parted, " on: rank ",
                         rank_of(more), " called ", call_text_of(more, *parted), " and rank ",
                         rank_of(fewer), " ", call_text_of(fewer, *parted))
                   : "",
            ". ", kRemedy);
    return fault(
        is_extra ? Kind::ExtraCall : Kind::MissingCall, is_extra ? with : without, more,
        parted.value_or(number), text);
  }

  /// The first number before `end` at which two ranks call from different places.
  std::optional<size_t> first_other_place(
      const MetGroup::Member& a, const MetGroup::Member& b, size_t end) const {
    for (size_t number = 0; number < end; ++number) {
      const auto &one = call_of(a, number).place, &other = call_of(b, number).place;
      if (!one.empty() && !other.empty() && one != other) return number;
    }
    return std::nullopt;
  }

  std::optional<OrderFault> never_waited(size_t number) const {
    Members with, without;
    for (const auto& member : group_.members) {
      if (!has(member, number) || has_root(call_of(member, number).kind)) continue;
      if (waited_[member.list][member.calls[number]]) {
        with.push_back(&member);
      } else if (list_of(member).is_complete) {
        without.push_back(&member);
      }
    }
    if (with.empty() || without.empty()) return std::nullopt;
    return fault(
        Kind::NeverWaited, without, *without.front(), number,
        str(group_text_of(), ": expected every rank to wait for collective number ", number,
            ", but ", text_of(without), " never ", without.size() == 1 ? "waits" : "wait", " for ",
            call_text_of(*without.front(), number), ", as ", text_of(with),
            with.size() == 1 ? " does" : " do",
            ". Call wait() on its work before the result is used."));
  }

  const std::vector<CallList>& lists_;
  const std::vector<std::vector<bool>>& waited_;  // by list and call
  const MetGroup& group_;
};

class MessageCheck {
 public:
  MessageCheck(const std::vector<CallList>& lists, const MetGroup& group, const MessageLane& lane)
      : lists_(lists), group_(group), lane_(lane) {}

  std::optional<OrderFault> run() const {
    if (!lane_.both_are_present) return std::nullopt;
    const auto &sends = lane_.sends, &receives = lane_.receives;
    const auto both = std::min(sends.size(), receives.size());
    for (size_t number = 0; number < both; ++number) {
      if (auto fault = difference(number)) return fault;
    }
    const bool lacks_receive = sends.size() > both;
    if (sends.size() == receives.size()) return std::nullopt;
    const int odd = lacks_receive ? lane_.to : lane_.from;
    const auto list = find_if(lists_, [&](const CallList& one) { return one.rank == odd; });
    if (!list->is_complete) return std::nullopt;
    return fault(
        Kind::UnmatchedMessage, odd, lacks_receive ? sends[both] : receives[both],
        str("as many receives as sends, but rank ", lane_.from, " sends ", sends.size(),
            " and rank ", lane_.to, " receives ", receives.size(), ": ",
            text_of(lacks_receive ? sends[both] : receives[both]), " on rank ",
            lacks_receive ? lane_.from : lane_.to, " meets none",
            ". Receive each message that is sent, on the rank that it is sent to"));
  }

 private:
  const ListedCall& at(const CallOfRank& one) const { return lists_[one.list].calls[one.call]; }
  std::string text_of(const CallOfRank& one) const { return call_text(lists_[one.list], at(one)); }

  std::optional<OrderFault> difference(size_t number) const {
    const auto &sent = lane_.sends[number], &received = lane_.receives[number];
    const auto &send = at(sent), &receive = at(received);
    const bool is_known = send.dtype != "-" && receive.dtype != "-";
    const bool is_other_dtype = is_known && send.dtype != receive.dtype;
    if (!is_other_dtype && send.bytes == receive.bytes) return std::nullopt;
    return fault(
        is_other_dtype ? Kind::OtherDtype : Kind::OtherSize, lane_.to, received,
        str("a message to have the same size and dtype on both, but rank ", lane_.from, " called ",
            text_of(sent), " and rank ", lane_.to, " ", text_of(received),
            ". Receive into a tensor of the size and dtype that is sent, in the order of sending"));
  }

  OrderFault fault(Kind kind, int odd, const CallOfRank& call, const std::string& rule) const {
    return {
        kind,
        {odd},
        group_.name,
        at(call).place,
        at(call).step,
        str(group_text(group_.name, group_.axis, group_.ranks), ", messages from rank ", lane_.from,
            " to rank ", lane_.to, ": expected ", rule, ".")};
  }

  const std::vector<CallList>& lists_;
  const MetGroup& group_;
  const MessageLane& lane_;
};

/// By list and call.
std::vector<std::vector<bool>> waited_calls(const std::vector<CallList>& lists) {
  std::vector<std::vector<bool>> waited;
  for (const auto& list : lists) {
    auto& own = waited.emplace_back(list.calls.size());
    for (const auto& event : list.events) {
      if (event.kind == ListedEvent::Kind::Wait) own[event.index] = true;
    }
  }
  return waited;
}

}  // namespace

const char* name_of(OrderFault::Kind kind) {
  constexpr const char* kNames[] = {
      "missing_group", "missing_call", "extra_call",        "other_kind",   "other_dtype",
      "other_size",    "other_root",   "unmatched_message", "never_waited", "deadlock"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<OrderFault> check_order(const std::vector<CallList>& lists, const Meetings& meetings) {
  const auto waited = waited_calls(lists);
  std::vector<OrderFault> faults;
  std::vector<bool> is_faulty(meetings.groups.size());
  const auto add = [&](size_t group, std::optional<OrderFault> fault) {
    if (!fault) return;
    is_faulty[group] = true;
    faults.push_back(std::move(*fault));
  };
  for (size_t i = 0; i < meetings.groups.size(); ++i) {
    add(i, GroupCheck(lists, waited, meetings.groups[i]).run());
  }
  for (const auto& lane : meetings.messages) {
    add(lane.group, MessageCheck(lists, meetings.groups[lane.group], lane).run());
  }
  for (auto& fault : find_deadlock(lists, meetings, is_faulty)) faults.push_back(std::move(fault));
  std::stable_sort(
      faults.begin(), faults.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return faults;
}

}  // namespace ddp::launch
