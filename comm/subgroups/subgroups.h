// Groups of some ranks of a group that exists.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>

namespace ddp {

class MonitoredGroup;

/// The kind of a group that is no axis of a mesh.
constexpr const char* kUnnamed = "group";

struct Subgroup {
  std::vector<int> ranks;       // in the parent, in the new group's order; may lack this one
  std::string key;              // differs between the groups that are made together
  std::string kind = kUnnamed;  // of its name, before its ranks in the job
  std::string coordinate = {};  // as of GroupRecipe
  std::optional<std::chrono::milliseconds> timeout = {};  // of its collectives; else the parent's
  bool is_of_hosts = false;  // over Gloo, and not over the parent's backends
};

/// "[0, 2, 3]"; of more than 64 ranks the first and last ones, their number, and a hash: differs
/// where the ranks do.
std::string member_list_text(const std::vector<int>& ranks);

/// \throws c10::Error  unless this library made the group.
MonitoredGroup& made_here(const char* call, const ProcessGroup& parent);

/// Exchanges a text with all ranks of the parent.
///
/// \param call  that all ranks are in: another one is an error on all ranks.
/// \param prepare  makes this rank's text. If it throws on a rank, all ranks throw.
/// \return the ranks' texts, by rank.
///
/// Collective: yes. Blocks: host.
std::vector<std::string> exchange_texts(
    const char* call, const ProcessGroup& parent, c10::function_ref<std::string()> prepare);

/// The same for texts that must be equal on all ranks.
///
/// \throws AgreedError  on all ranks, with two texts that differ.
void exchange_equal_texts(
    const char* call, const ProcessGroup& parent, c10::function_ref<std::string()> prepare);

/// Connects groups, one after the other, and waits once for all ranks of the parent.
///
/// \param groups  those of this rank; as many on each rank, in the same order. One that lacks this
///        rank is not connected here.
/// \return the groups; an empty one for each that lacks this rank.
///
/// Collective: yes, over the parent. Blocks: host.
std::vector<ProcessGroup> connect_subgroups(
    const char* call, const ProcessGroup& parent, const std::vector<Subgroup>& groups);

}  // namespace ddp
