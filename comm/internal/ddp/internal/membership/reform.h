// How a form differs from the one before, and back. A coordinator and its members have both, so it
// needs no LibTorch.
#pragma once

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ddp/internal/membership/lines.h>

namespace ddp::membership {

namespace reform_detail {

using Ids = std::unordered_set<ProcessId>;

inline Ids ids_of(const std::vector<Place>& places) {
  Ids ids;
  for (const Place& place : places) ids.insert(place.id);
  return ids;
}

}  // namespace reform_detail

/// A pure function, linear in the members. A process keeps its slot for life.
inline Reform change_of(const Form& before, const Form& after) {
  Reform change;
  change.generation = after.generation;
  change.applied = after.applied;
  change.turns = after.turns;
  change.base = before.generation;
  change.from_start = after.sources.empty();
  const auto old_ids = reform_detail::ids_of(before.members);
  const auto new_ids = reform_detail::ids_of(after.members);
  const reform_detail::Ids sources(after.sources.begin(), after.sources.end());
  for (const Place& place : before.members) {
    if (new_ids.count(place.id) == 0) change.gone.push_back(place.id);
  }
  for (const Place& place : after.members) {
    if (old_ids.count(place.id) == 0) change.added.push_back(place);
    const bool lacks_state = !change.from_start && sources.count(place.id) == 0;
    if (lacks_state) change.without_state.push_back(place.id);
  }
  return change;
}

/// \return the form after `before`; nothing where the change is one of another form. Members come
/// in the order of their slots, as in every form, and sources in that of members.
inline std::optional<Form> apply(const Reform& change, const Form& before) {
  if (change.base != before.generation) return std::nullopt;
  Form after;
  after.generation = change.generation;
  after.applied = change.applied;
  after.turns = change.turns;
  const reform_detail::Ids gone(change.gone.begin(), change.gone.end());
  for (const Place& place : before.members) {
    if (gone.count(place.id) == 0) after.members.push_back(place);
  }
  after.members.insert(after.members.end(), change.added.begin(), change.added.end());
  std::sort(after.members.begin(), after.members.end(), [](const Place& a, const Place& b) {
    return a.slot < b.slot;
  });
  if (change.from_start) return after;
  const reform_detail::Ids lacking(change.without_state.begin(), change.without_state.end());
  for (const Place& place : after.members) {
    if (lacking.count(place.id) == 0) after.sources.push_back(place.id);
  }
  return after;
}

}  // namespace ddp::membership
