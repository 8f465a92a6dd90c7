#include "monitor/wait_cycle.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// How many waits a text shows.
constexpr size_t kShownWaits = 8;

// By rank and wait: the ranks that have not come to the call. Ranks are indices.
using Missing = std::vector<std::vector<std::vector<size_t>>>;

Missing missing_ranks(const std::vector<BlockedRank>& ranks) {
  std::map<std::string, std::vector<std::pair<size_t, uint64_t>>> members;
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (const auto& [list, count] : ranks[i].made) members[list].emplace_back(i, count);
  }
  Missing missing(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (const auto& wait : ranks[i].waits) {
      auto& of_wait = missing[i].emplace_back();
      for (const auto& [other, count] : members[wait.list]) {
        const bool is_needed = wait.needs == AwaitedCall::kAll || wait.needs == ranks[other].rank;
        if (other != i && is_needed && count <= wait.number) of_wait.push_back(other);
      }
    }
  }
  return missing;
}

// Whether each rank can only wait.
std::vector<char> find_stuck(const Missing& missing) {
  std::vector<char> stuck(missing.size(), 1);
  const auto is_stuck = [&](size_t rank) { return stuck[rank] != 0; };
  const auto ends = [&](const std::vector<size_t>& of_wait) { return none_of(of_wait, is_stuck); };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t rank = 0; rank < missing.size(); ++rank) {
      const auto& waits = missing[rank];
      if (!stuck[rank] || (!waits.empty() && none_of(waits, ends))) continue;
      stuck[rank] = 0;
      changed = true;
    }
  }
  return stuck;
}

struct Step {
  size_t from = 0, wait = 0;
};

// The shortest way from `start` back to itself; empty if there is none.
std::vector<Step> cycle_through(
    size_t start, const Missing& missing, const std::vector<char>& stuck) {
  std::vector<std::optional<Step>> reached_by(missing.size());
  std::deque<size_t> next{start};
  while (!next.empty() && !reached_by[start]) {
    const auto from = next.front();
    next.pop_front();
    for (size_t wait = 0; wait < missing[from].size(); ++wait) {
      for (const auto to : missing[from][wait]) {
        if (!stuck[to] || reached_by[to]) continue;
        reached_by[to] = Step{from, wait};
        next.push_back(to);
      }
    }
  }
  std::vector<Step> steps;
  if (!reached_by[start]) return steps;
  for (auto at = start; steps.empty() || at != start; at = steps.back().from) {
    steps.push_back(*reached_by[at]);
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

}  // namespace

std::vector<WaitOfRank> find_wait_cycle(const std::vector<BlockedRank>& ranks) {
  const auto missing = missing_ranks(ranks);
  const auto stuck = find_stuck(missing);
  std::vector<Step> fewest;
  for (size_t start = 0; start < ranks.size() && fewest.size() != 2; ++start) {
    if (!stuck[start]) continue;
    auto steps = cycle_through(start, missing, stuck);
    if (!steps.empty() && (fewest.empty() || steps.size() < fewest.size())) {
      fewest = std::move(steps);
    }
  }
  std::vector<WaitOfRank> cycle;
  for (const auto& [from, wait] : fewest) {
    cycle.push_back({ranks[from].rank, ranks[from].waits[wait].text});
  }
  return cycle;
}

std::string to_text(const std::vector<WaitOfRank>& cycle) {
  std::string waits;
  for (size_t i = 0; i < std::min(cycle.size(), kShownWaits); ++i) {
    const auto& other = cycle[(i + 1) % cycle.size()];
    waits += ddp::str(i > 0 ? "; " : "", cycle[i].text, " for rank ", other.rank);
  }
  if (cycle.size() > kShownWaits) {
    waits += ddp::str("; and ", cycle.size() - kShownWaits, " more ranks");
  }
  return ddp::str(
      "deadlock: ", waits,
      ": they wait for each other. Make the collectives of all ranks in the same order across "
      "groups");
}

}  // namespace ddp
