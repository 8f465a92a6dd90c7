#pragma once

#include <chrono>
#include <vector>

#include "base/network_interface.h"
#include "group/backend_spec.h"
#include "store/bounded_store.h"

namespace ddp {

/// The settings that a group was made with, so that its subgroups are made alike.
struct GroupRecipe {
  BackendSpec backends;
  GlooDevices gloo_devices;
  std::chrono::milliseconds timeout{0};
  std::vector<int> world_ranks;   // of the group's ranks
  int store_host = -1;            // world rank whose process hosts the store; -1: none, or unknown
  bool backends_required = true;  // the user named them; else others may replace them
  /// The group's store, over a connection of its own for the monitors of all groups. Empty: the
  /// group's own connection.
  c10::intrusive_ptr<BoundedStore> monitor_store = {};
};

}  // namespace ddp
