// Right lists of calls with a mistake in them.
#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <ddp/internal/text.h>

#include "differential/lists.h"
#include "launch/pretend/call_words.h"

namespace ddp::differential {
namespace {

using launch::CallList;
using launch::ListedCall;
using launch::ListedEvent;

/// Removes the events of a call, and gives those after it their new indices.
void remove_events(CallList& list, size_t call) {
  auto& events = list.events;
  const auto is_of_call = [](const ListedEvent& event) {
    return event.kind == ListedEvent::Kind::Call || event.kind == ListedEvent::Kind::Wait;
  };
  events.erase(
      std::remove_if(
          events.begin(), events.end(),
          [&](const auto& event) { return is_of_call(event) && event.index == call; }),
      events.end());
  for (auto& event : events) {
    if (is_of_call(event) && event.index > call) --event.index;
  }
}

/// The parts of a call in which ranks have to agree.
auto signature(const ListedCall& call) {
  return std::make_tuple(
      call.kind, call.dtype, launch::has_equal_bytes(call.kind) ? call.bytes : 0,
      launch::has_root(call.kind) ? call.peer : -1);
}

/// The next collective of the same group.
std::optional<size_t> next_of_group(const CallList& list, size_t call) {
  for (size_t i = call + 1; i < list.calls.size(); ++i) {
    if (list.calls[i].group == list.calls[call].group && !list.calls[i].is_message()) return i;
  }
  return std::nullopt;
}

/// Changes a call, and says how; nothing where that call is none that it could be made with.
using Mistake = std::function<std::optional<std::string>(CallList&, size_t call)>;

std::optional<std::string> leave_out(CallList& list, size_t call) {
  list.calls.erase(list.calls.begin() + static_cast<long>(call));
  remove_events(list, call);
  return "is left out";
}

std::optional<std::string> swap_with_next(CallList& list, size_t call) {
  const auto next = next_of_group(list, call);
  auto& calls = list.calls;
  if (calls[call].is_message() || !next || signature(calls[call]) == signature(calls[*next]))
    return std::nullopt;
  std::swap(calls[call], calls[*next]);
  return "comes after the next one of its group";
}

std::optional<std::string> change_size(CallList& list, size_t call) {
  auto& one = list.calls[call];
  if (one.is_message() || !launch::has_equal_bytes(one.kind) || one.kind == "barrier")
    return std::nullopt;
  one.bytes += 8;
  return "has 8 bytes more";
}

std::optional<std::string> change_dtype(CallList& list, size_t call) {
  auto& one = list.calls[call];
  if (one.dtype == "-") return std::nullopt;
  one.dtype = "complexhalf";
  return "has another dtype";
}

std::optional<std::string> change_root(CallList& list, size_t call) {
  auto& one = list.calls[call];
  const auto size = static_cast<int>(list.groups[one.group].ranks.size());
  if (!launch::has_root(one.kind)) return std::nullopt;
  one.peer = (one.peer + 1) % size;
  return "has another root";
}

std::optional<std::string> change_group(CallList& list, size_t call) {
  auto& one = list.calls[call];
  if (one.is_message()) return std::nullopt;
  for (size_t group = 0; group < list.groups.size(); ++group) {
    if (list.groups[group].ranks == list.groups[one.group].ranks) continue;
    one.group = group;
    one.peer = launch::has_root(one.kind) ? 0 : one.peer;
    return "is called in another group";
  }
  return std::nullopt;
}

std::optional<std::string> change_kind(CallList& list, size_t call) {
  auto& one = list.calls[call];
  if (one.is_message()) return std::nullopt;
  one.kind = one.kind == "all_gather" ? "all_reduce" : "all_gather";
  return "is of another kind";
}

}  // namespace

Broken break_one(std::vector<CallList> lists, uint64_t seed) {
  const std::vector<Mistake> mistakes{leave_out,   swap_with_next, change_size, change_dtype,
                                      change_root, change_group,   change_kind};
  auto state = mix(seed);
  const auto below = [&](size_t bound) {
    return static_cast<size_t>((state = mix(state)) % bound);
  };
  for (int tries = 0; tries < 100 && lists.size() > 1; ++tries) {
    const auto rank = below(lists.size());
    const auto& own = lists[rank];
    if (own.calls.empty()) continue;
    const auto call = below(own.calls.size());
    auto broken = lists;
    const auto how = mistakes[below(mistakes.size())](broken[rank], call);
    if (!how) continue;
    return {
        std::move(broken), ddp::str(
                               "call ", call, " of rank ", own.rank, ", ",
                               call_text(own, own.calls[call]), ", ", *how)};
  }
  return {std::move(lists), ""};
}

}  // namespace ddp::differential
