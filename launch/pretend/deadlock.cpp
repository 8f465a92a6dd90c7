// Ranks that wait for each other, found by letting them go through their lists.
#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/pretend/call_words.h"
#include "launch/pretend/order_check.h"
#include "launch/pretend/replay.h"
#include "launch/pretend/steps.h"

namespace ddp::launch {
namespace {

// How many waits a text shows.
constexpr size_t kShownWaits = 8;

/// By list: the lists that have the call for which this one waits, but do not come to it.
using Awaited = std::vector<std::vector<size_t>>;

Awaited awaited_lists(
    const std::vector<CallList>& lists, const Meetings& meetings, const Replay& end) {
  Awaited awaited(lists.size());
  for (size_t list = 0; list < lists.size(); ++list) {
    if (end.ranks[list].has_ended) continue;
    const auto meeting = meetings.of_calls[list][end.ranks[list].waits_for];
    for (const auto& other : meetings.all[meeting].calls) {
      if (other.call >= end.ranks[other.list].made) awaited[list].push_back(other.list);
    }
  }
  return awaited;
}

/// The shortest way from `start` back to itself; empty if there is none.
std::vector<size_t> cycle_through(size_t start, const Awaited& awaited) {
  std::vector<std::optional<size_t>> reached_from(awaited.size());
  std::deque<size_t> next{start};
  while (!next.empty() && !reached_from[start]) {
    const auto from = next.front();
    next.pop_front();
    for (const auto to : awaited[from]) {
      if (reached_from[to]) continue;
      reached_from[to] = from;
      next.push_back(to);
    }
  }
  std::vector<size_t> cycle;
  if (!reached_from[start]) return cycle;
  for (auto at = start; cycle.empty() || at != start; at = cycle.back()) {
    cycle.push_back(*reached_from[at]);
  }
  std::reverse(cycle.begin(), cycle.end());
  return cycle;
}

std::vector<size_t> shortest_cycle(const Awaited& awaited) {
  std::vector<size_t> shortest;
  for (size_t start = 0; start < awaited.size() && shortest.size() != 2; ++start) {
    auto cycle = cycle_through(start, awaited);
    if (!cycle.empty() && (shortest.empty() || cycle.size() < shortest.size())) {
      shortest = std::move(cycle);
    }
  }
  return shortest;
}

}  // namespace

std::vector<OrderFault> find_deadlock(
    const std::vector<CallList>& lists, const Meetings& meetings,
    const std::vector<bool>& is_faulty) {
  const auto end = replay(lists, meetings, last_whole_steps(lists), std::nullopt);
  const auto cycle = shortest_cycle(awaited_lists(lists, meetings, end));
  if (cycle.empty()) return {};
  OrderFault fault{OrderFault::Kind::Deadlock, {}, "", "", -1, "deadlock: "};
  for (size_t i = 0; i < cycle.size(); ++i) {
    const auto& list = lists[cycle[i]];
    const auto index = end.ranks[cycle[i]].waits_for;
    const auto& meeting = meetings.all[meetings.of_calls[cycle[i]][index]];
    const auto& group = meetings.groups[meeting.group];
    if (is_faulty[meeting.group]) return {};
    const auto& call = list.calls[index];
    if (i == 0) {
      fault.group = group.name;
      fault.place = call.place;
      fault.step = call.step;
    }
    fault.ranks.push_back(list.rank);
    if (i >= kShownWaits) continue;
    fault.text +=
        str(i > 0 ? "; " : "", "rank ", list.rank, " waits in ", call_text(list, call), ", number ",
            meeting.number, " of ", group_text(group.name, group.axis, group.ranks), ", for rank ",
            lists[cycle[(i + 1) % cycle.size()]].rank);
  }
  if (cycle.size() > kShownWaits) {
    fault.text += str("; and ", cycle.size() - kShownWaits, " more ranks");
  }
  fault.text +=
      ": they wait for each other. Make the collectives of all ranks in the same order across "
      "groups.";
  return {std::move(fault)};
}

}  // namespace ddp::launch
