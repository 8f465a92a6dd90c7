#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <ddp/process_group.h>

#include "base/deadline.h"
#include "base/environment.h"
#include "store/bounded_store.h"

namespace ddp {

struct GenerationOfJob;
struct GroupRecipe;

/// Connects to all ranks and makes the group: init_process_group without the default group.
ProcessGroup build_group(const ProcessGroupOptions& options);

/// The same for a generation of an elastic job. Connecting is limited by `limit`, too.
ProcessGroup build_group(
    const ProcessGroupOptions& options, GenerationOfJob generation,
    std::chrono::milliseconds limit);

/// take_own_device() of an elastic job.
std::string make_own_device_current(const ProcessGroupOptions& options);

/// Connects the backends of a group after all its members have arrived.
///
/// \param store  of this group alone.
/// \param key  of the group; differs between the groups of a job.
/// \param parent  the group that this one is made of; null if there is none.
/// \param parent_ranks  of the members.
ProcessGroup connect_group(
    const GroupRecipe& recipe, const Deadline& deadline,
    const c10::intrusive_ptr<BoundedStore>& store, int rank, const std::string& name,
    const std::string& key, const ProcessGroup& parent = {},
    const std::vector<int>& parent_ranks = {});

/// Called instead on the other ranks of `parent`.
void sit_out_group(
    const GroupRecipe& recipe, const Deadline& deadline, const std::string& name,
    const ProcessGroup& parent);

/// This process's number on its host; 0 in a world of one that no launcher started.
///
/// \param counted  by the ranks themselves, where no launcher gave it.
/// \throws c10::Error  naming the variables, if none is set and there are several ranks.
int local_rank_of(
    const Environment& environment, int world_size, const std::optional<int>& counted = {});

}  // namespace ddp
