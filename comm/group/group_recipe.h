#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/process_group_options.h>

#include "base/network_interface.h"
#include "group/backend_spec.h"

namespace ddp {

class JobMonitor;

/// The settings that a group was made with, so that its subgroups are made alike.
struct GroupRecipe {
  BackendSpec backends;
  GlooDevices gloo_devices;
  std::chrono::milliseconds timeout{0};
  std::vector<int> world_ranks;   // of the group's ranks
  bool backends_required = true;  // the user named them; else others may replace them
  std::shared_ptr<JobMonitor> job = {};
  std::optional<c10::Device> device_id = {};  // this rank's GPU, to which NCCL connects at once
  NcclOptions nccl = {};
  bool is_mirror = false;       // of a process that has not met the other ranks yet
  std::string coordinate = {};  // of this rank in a mesh: "dp 1, tp 0"; "" without one
};

}  // namespace ddp
