#pragma once

#include <string>
#include <vector>

#include <ddp/process_group.h>

#include "base/environment.h"

namespace ddp {

/// Connects to all ranks and makes the group: init_process_group without the default group.
ProcessGroup build_group(const ProcessGroupOptions& options);

/// new_group().
ProcessGroup build_subgroup(const ProcessGroup& parent, const std::vector<int>& ranks);

/// split_group().
ProcessGroup build_split(const ProcessGroup& parent, int color, int key);

/// The backend that carries the group's tensors of that device: "shm", "gloo", "nccl".
///
/// \throws c10::Error  when there is none.
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device);

/// This process's number on its host; 0 in a world of one that no launcher started.
///
/// \throws c10::Error  naming the variables, if none is set and there are several ranks.
int local_rank_of(const Environment& environment, int world_size);

}  // namespace ddp
