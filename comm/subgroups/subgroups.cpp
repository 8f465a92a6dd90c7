// Groups of some ranks of a group that exists.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>
#include <ddp/process_group.h>

#include "group/group_builder.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

std::string list_text(const std::vector<int>& ranks) { return '[' + joined_by(", ", ranks) + ']'; }

void check_ranks(const std::vector<int>& sorted, const c10d::ProcessGroup& parent) {
  const auto text = list_text(sorted);
  const auto place = on_rank_text(parent);
  const int world_size = parent.getSize();
  DDP_CHECK_VALUE(
      !sorted.empty(), "new_group: expected at least one rank, got none ", place,
      ". List the members, the same on all ranks.");
  for (size_t i = 0; i < sorted.size(); ++i) {
    DDP_CHECK_VALUE(
        sorted[i] >= 0 && sorted[i] < world_size,
        "new_group: expected ranks of the parent group, 0 to ", world_size - 1, ", got ", sorted[i],
        " in ", text, " ", place, ". Leave out what is not one of them.");
    DDP_CHECK_VALUE(
        i == 0 || sorted[i] != sorted[i - 1], "new_group: expected each rank once, got ", sorted[i],
        " twice in ", text, " ", place, ". List it once.");
  }
}

MonitoredGroup& made_here(const char* call, const ProcessGroup& parent) {
  auto* group = dynamic_cast<MonitoredGroup*>(parent.get());
  DDP_CHECK(
      group, call, ": expected a group that this library made, got another one ",
      on_rank_text(*parent),
      ". Use one that init_process_group, make_process_group, new_group or split_group made.");
  return *group;
}

/// Exchanges a text with all ranks of the parent.
///
/// \param prepare  makes this rank's text. If it throws on a rank, all ranks throw.
template <typename Prepare>
std::vector<std::string> exchange(
    const char* call, const ProcessGroup& parent, const Prepare& prepare) {
  const std::string problem_prefix = "!", text_prefix = ddp::str(call, "\n");
  std::exception_ptr own;
  std::string text;
  try {
    text = text_prefix + prepare();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = problem_prefix + text_of(error);
  }
  std::vector<std::string> texts;
  try {
    texts = agree(text, parent, call, [&](const std::vector<std::string>& by_rank) -> std::string {
      for (size_t rank = 0; rank < by_rank.size(); ++rank) {
        const auto& other = by_rank[rank];
        if (other.rfind(problem_prefix, 0) == 0) {
          return ddp::str(call, " on rank ", rank, " of ", by_rank.size(), ": ", other.substr(1));
        }
        if (other.rfind(text_prefix, 0) != 0) {
          return ddp::str(
              call, ": expected all ranks to call it, but rank ", rank, " of ", by_rank.size(),
              " calls ", other.substr(0, other.find('\n')), ". Make the same calls on every rank.");
        }
      }
      return "";
    });
  } catch (const AgreedError&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  for (auto& of_rank : texts) of_rank.erase(0, text_prefix.size());
  return texts;
}

/// The ranks that wait in the exchange after connecting, for the parent's timeout, learn why a rank
/// could not connect: its members stop trying before that.
Deadline connecting_deadline(std::chrono::milliseconds timeout) {
  return Deadline(timeout * 3 / 4);
}

/// Connects the members of each new group.
///
/// \param ranks  the members' ranks in the parent, in the new group's order.
/// \param suffix  of the group's keys; differs between groups that are made together.
/// \return an empty group if this rank is not among `ranks`.
ProcessGroup connect_members(
    const char* call, const ProcessGroup& parent, const std::vector<int>& ranks,
    const std::string& suffix) {
  auto& group = made_here(call, parent);
  const auto key = group.next_subgroup_key() + suffix;
  ProcessGroup made;
  const auto connect = [&] {
    const auto own = std::find(ranks.begin(), ranks.end(), parent->getRank());
    if (own == ranks.end()) return "";
    auto recipe = group.recipe();
    recipe.world_ranks.clear();
    for (const int rank : ranks) {
      recipe.world_ranks.push_back(group.recipe().world_ranks[static_cast<size_t>(rank)]);
    }
    made = connect_group(
        recipe, connecting_deadline(recipe.timeout), bounded(parent->getStore())->with_prefix(key),
        static_cast<int>(own - ranks.begin()), "group " + list_text(recipe.world_ranks), key,
        parent);
    return "";
  };
  try {
    exchange(call, parent, connect);
  } catch (...) {
    made.reset();  // here, where it does not count as left by an exception
    throw;
  }
  return made;
}

}  // namespace

ProcessGroup new_group(const std::vector<int>& ranks, const GroupArg& parent_arg) {
  constexpr const char* kCall = "new_group";
  const auto parent = parent_arg.get();
  made_here(kCall, parent);
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const auto lists = exchange(kCall, parent, [&] {
    check_ranks(sorted, *parent);
    return list_text(sorted);
  });
  const auto other = std::find_if_not(
      lists.begin(), lists.end(), [&](const auto& list) { return list == lists[0]; });
  if (other != lists.end()) {
    own_monitor_of(*parent)->throw_agreed(ddp::str(
        kCall, ": expected all ranks to call it alike, but rank 0 calls it with ", lists[0],
        " and rank ", other - lists.begin(), " with ", *other, ". Give every rank the same."));
  }
  return connect_members(kCall, parent, sorted, "");
}

ProcessGroup split_group(int color, int key, const GroupArg& parent_arg) {
  constexpr const char* kCall = "split_group";
  const auto parent = parent_arg.get();
  made_here(kCall, parent);
  const auto given = exchange(kCall, parent, [&] {
    DDP_CHECK_VALUE(
        color >= -1, "split_group: expected a color of at least -1, got ", color, " ",
        on_rank_text(*parent), ". Give ranks of one group the same number, and -1 for no group.");
    return ddp::str(color, " ", key);
  });
  std::vector<std::pair<int, int>> members;  // key and rank
  for (size_t rank = 0; rank < given.size(); ++rank) {
    int its_color = -1, its_key = 0;
    InputText(given[rank]) >> its_color >> its_key;
    if (color >= 0 && its_color == color) members.emplace_back(its_key, static_cast<int>(rank));
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [_, rank] : members) ranks.push_back(rank);
  return connect_members(kCall, parent, ranks, ddp::str('.', color));
}

}  // namespace ddp
