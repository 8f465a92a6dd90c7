#include "subgroups/subgroups.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "group/group_builder.h"
#include "group/monitored_group.h"

namespace ddp {

/// Each rank gets the text of all: long ones would be quadratic in the number of ranks.
std::string member_list_text(const std::vector<int>& ranks) {
  constexpr size_t kMostWhole = 64;
  constexpr std::ptrdiff_t kEnds = 4;
  if (ranks.size() <= kMostWhole) return '[' + joined_by(", ", ranks) + ']';
  const std::string_view bytes(
      reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof(int));
  const std::vector<int> first(ranks.begin(), ranks.begin() + kEnds);
  const std::vector<int> last(ranks.end() - kEnds, ranks.end());
  return ddp::str(
      '[', joined_by(", ", first), ", ..., ", joined_by(", ", last), "] (", ranks.size(),
      " ranks, hash ", fnv1a(bytes), ')');
}

namespace {

void check_ranks(const std::vector<int>& sorted, const c10d::ProcessGroup& parent) {
  const auto text = member_list_text(sorted);
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

/// The ranks that wait in the exchange after connecting, for the parent's timeout, learn why a rank
/// could not connect: its members stop trying before that.
Deadline connecting_deadline(std::chrono::milliseconds timeout) {
  return Deadline(timeout * 3 / 4);
}

}  // namespace

MonitoredGroup& made_here(const char* call, const ProcessGroup& parent) {
  auto* group = dynamic_cast<MonitoredGroup*>(parent.get());
  DDP_CHECK(
      group, call, ": expected a group that this library made, got another one ",
      on_rank_text(*parent),
      ". Use one that init_process_group, make_process_group, new_group or split_group made.");
  DDP_CHECK(
      !group->recipe().is_mirror, call, ": expected the group of ranks that train, got a process ",
      "that waits to join them", on_rank_text(*parent),
      ". Make further groups in Elastic::on_change().");
  return *group;
}

std::vector<std::string> exchange_texts(
    const char* call, const ProcessGroup& parent, c10::function_ref<std::string()> prepare) {
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

void exchange_equal_texts(
    const char* call, const ProcessGroup& parent, c10::function_ref<std::string()> prepare) {
  const auto texts = exchange_texts(call, parent, prepare);
  const auto other = std::find_if_not(
      texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0]; });
  if (other == texts.end()) return;
  own_monitor_of(*parent)->throw_agreed(ddp::str(
      call, ": expected all ranks to call it alike, but rank 0 calls it with ", texts[0],
      " and rank ", other - texts.begin(), " with ", *other, ". Give every rank the same."));
}

std::vector<ProcessGroup> connect_subgroups(
    const char* call, const ProcessGroup& parent, const std::vector<Subgroup>& groups) {
  auto& parent_group = made_here(call, parent);
  const auto key_of_all = parent_group.next_subgroup_key();
  std::vector<ProcessGroup> made(groups.size());
  const auto deadline = connecting_deadline(parent_group.recipe().timeout);
  const auto connect = [&](const Subgroup& group) -> ProcessGroup {
    const auto& ranks = group.ranks;
    const auto own = std::find(ranks.begin(), ranks.end(), parent->getRank());
    auto recipe = parent_group.recipe();
    if (own == ranks.end()) {
      sit_out_group(recipe, deadline, group.kind + " " + member_list_text(ranks), parent);
      return {};
    }
    // Else that of the parent's mesh, which is this rank's place in the job, too.
    if (!group.coordinate.empty()) recipe.coordinate = group.coordinate;
    const bool is_whole = ranks.size() == static_cast<size_t>(parent->getSize());
    if (group.kind != kUnnamed || !is_whole) recipe.axis = group.kind;
    if (group.timeout) recipe.timeout = *group.timeout;
    if (group.is_of_hosts) {
      recipe.backends = {{"cpu", "gloo"}};
      recipe.device_id.reset();
    }
    recipe.world_ranks.clear();
    for (const int rank : ranks) {
      recipe.world_ranks.push_back(parent_group.recipe().world_ranks[static_cast<size_t>(rank)]);
    }
    const auto key = key_of_all + group.key;
    return connect_group(
        recipe, deadline, bounded(parent->getStore())->with_prefix(key),
        static_cast<int>(own - ranks.begin()),
        group.kind + " " + member_list_text(recipe.world_ranks), key, parent, ranks);
  };
  try {
    exchange_texts(call, parent, [&] {
      std::transform(groups.begin(), groups.end(), made.begin(), connect);
      return "";
    });
  } catch (...) {
    made.clear();  // here, where they do not count as left by an exception
    throw;
  }
  return made;
}

ProcessGroup new_group(const std::vector<int>& ranks, const GroupArg& parent_arg) {
  const auto parent = parent_arg.get();
  return new_group(ranks, made_here("new_group", parent).recipe().timeout, parent);
}

ProcessGroup new_group(
    const std::vector<int>& ranks, std::chrono::milliseconds timeout, const GroupArg& parent_arg) {
  constexpr const char* kCall = "new_group";
  const auto parent = parent_arg.get();
  const auto& parent_group = made_here(kCall, parent);
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  exchange_equal_texts(kCall, parent, [&] {
    check_ranks(sorted, *parent);
    DDP_CHECK_VALUE(
        timeout.count() > 0, "new_group: expected a timeout of at least 1 ms, got ",
        timeout.count(), " ms ", on_rank_text(*parent),
        ". Give what a collective may take, such as std::chrono::minutes(10).");
    const bool is_own = timeout != parent_group.recipe().timeout;
    return member_list_text(sorted) + (is_own ? ddp::str(" and ", timeout.count(), " ms") : "");
  });
  Subgroup group{sorted, ""};
  group.timeout = std::min(timeout, Deadline::kLongest);
  return connect_subgroups(kCall, parent, {group})[0];
}

ProcessGroup new_host_group(const ProcessGroup& group) {
  constexpr const char* kCall = "new_host_group";
  made_here(kCall, group);
  Subgroup hosts{numbers_up_to(group->getSize()), ""};
  hosts.is_of_hosts = true;
  return connect_subgroups(kCall, group, {hosts})[0];
}

ProcessGroup split_group(int color, int key, const GroupArg& parent_arg) {
  constexpr const char* kCall = "split_group";
  const auto parent = parent_arg.get();
  made_here(kCall, parent);
  check_not_pretended(
      kCall, "Name the members: new_group(ranks), or init_device_mesh for groups along axes.");
  const auto given = exchange_texts(kCall, parent, [&] {
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
  return connect_subgroups(kCall, parent, {{ranks, ddp::str('.', color)}})[0];
}

}  // namespace ddp
