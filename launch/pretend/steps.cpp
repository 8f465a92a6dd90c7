#include "launch/pretend/steps.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

namespace ddp::launch {
namespace {

/// The events with which the list's steps begin.
std::vector<size_t> begins_of_steps(const CallList& list) {
  std::vector<size_t> begins;
  for (size_t i = 0; i < list.events.size(); ++i) {
    if (list.events[i].kind == ListedEvent::Kind::Step) begins.push_back(i);
  }
  return begins;
}

int64_t number_at(const CallList& list, size_t event) {
  return static_cast<int64_t>(list.events[event].index);
}

StepOfList step_of(const CallList& list, int64_t last_number) {
  const auto begins = begins_of_steps(list);
  if (begins.empty()) return {-1, 0, list.events.size()};
  auto last = begins.size() - 1;
  if (last == 0) return {number_at(list, begins[0]), begins[0], list.events.size()};
  // Ranks may have made different numbers of steps.
  do {
    --last;
  } while (last > 0 && number_at(list, begins[last]) > last_number);
  return {number_at(list, begins[last]), begins[last], begins[last + 1]};
}

}  // namespace

std::vector<StepOfList> last_whole_steps(const std::vector<CallList>& lists) {
  auto last_number = std::numeric_limits<int64_t>::max();
  for (const auto& list : lists) {
    const auto begins = begins_of_steps(list);
    if (begins.size() < 2) continue;
    last_number = std::min(last_number, number_at(list, begins[begins.size() - 2]));
  }
  std::vector<StepOfList> steps;
  for (const auto& list : lists) steps.push_back(step_of(list, last_number));
  return steps;
}

std::vector<CallsOfKind> calls_by_kind(const CallList& list, const StepOfList& step) {
  std::map<std::tuple<std::string, std::string, size_t>, CallsOfKind> sums;
  for (size_t i = step.begin; i < step.end; ++i) {
    if (list.events[i].kind != ListedEvent::Kind::Call) continue;
    const auto& call = list.calls[list.events[i].index];
    const auto& group = list.groups[call.group];
    auto& sum = sums[{group.axis, call.kind, group.ranks.size()}];
    sum.axis = group.axis;
    sum.kind = call.kind;
    sum.ranks = static_cast<int64_t>(group.ranks.size());
    sum.calls += 1;
    sum.bytes += call.bytes;
  }
  std::vector<CallsOfKind> result;
  for (auto& [key, sum] : sums) result.push_back(std::move(sum));
  return result;
}

double seconds_of_computing(const CallList& list, const StepOfList& step) {
  double seconds = 0;
  // An event has the time before it.
  const auto last = std::min(step.end + 1, list.events.size());
  for (size_t i = step.begin + 1; i < last; ++i) seconds += list.events[i].computing;
  return seconds;
}

}  // namespace ddp::launch
