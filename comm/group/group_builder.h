#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ddp/process_group.h>

#include "base/environment.h"
#include "base/network_interface.h"
#include "group/backend_spec.h"
#include "store/bounded_store.h"

namespace ddp {

/// The settings that a group's backends are made with, so that subgroups are made alike.
struct World {
  BackendSpec backends;
  GlooDevices gloo_devices;
  std::chrono::milliseconds timeout{0};
  int store_host = -1;            // the rank whose process hosts the store; -1: none, or unknown
  bool backends_required = true;  // the user named them; else others may replace them
  /// The group's store, over a connection of its own for the monitors of all groups. Empty: the
  /// group's own connection.
  c10::intrusive_ptr<BoundedStore> monitor_store = {};
};

struct BuiltGroup {
  ProcessGroup group;
  World world;
};

/// Connects to all ranks and makes the group: init_process_group without the default group.
BuiltGroup build_group(const ProcessGroupOptions& options);

/// new_group, over any parent.
ProcessGroup build_subgroup(const BuiltGroup& parent, const std::vector<int>& ranks);

/// The backend that carries the group's tensors of that device: "shm", "gloo", "nccl".
///
/// \throws c10::Error  when there is none.
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device);

/// This process's number on its host; 0 in a world of one that no launcher started.
///
/// \throws c10::Error  naming the variables, if none is set and there are several ranks.
int local_rank_of(const Environment& environment, int world_size);

}  // namespace ddp
