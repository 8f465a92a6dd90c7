// The backends that groups can be made of: the library's, and those that a program has registered.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ddp/collective_backend.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>
#include <ddp/process_group_options.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"
#include "base/network_interface.h"

namespace ddp::backends {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// The settings that every backend is made from.
struct Setup {
  c10::intrusive_ptr<c10d::Store> store;  // of this backend alone
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};  // of its collectives
  Deadline connect_by{timeout};
  std::string group_name;
  std::vector<uint64_t> global_ranks;  // of the group's members, in group order
  GlooDevices gloo_devices;
  bool required = true;    // the user named the backend; else another one may replace it
  BackendPtr parent = {};  // of the group that this one is made of, for the same tensors
  std::vector<int> parent_ranks = {};         // of the members, in that group
  std::optional<c10::Device> device_id = {};  // of a backend of GPUs: to connect at once
  NcclOptions nccl = {};
};

/// The properties of a backend. The file of each of the library's backends has its own.
struct RegisteredBackend {
  std::string name;                  // in ProcessGroupOptions' backend()
  std::vector<std::string> devices;  // whose tensors it carries, in c10::Device's words: "cpu"
  bool is_default = false;           // backend("") chooses it for its devices
  std::function<BackendCapabilities()> capabilities;
  // The memory of one of its backends; null if it has none.
  std::shared_ptr<GradientMemory> (*gradient_memory)(c10d::Backend&) = nullptr;
  std::function<BackendPtr(const Setup&)> make;  // null: no build has it
  // On the ranks of setup.parent that are not in a new group, or alone in it, while the others
  // make() it; null: they have no part in it.
  void (*participate_as_non_member)(const Setup&) = nullptr;
  std::string why_no_build;    // a sentence, if make is null
  bool is_own = false;         // a program has registered it: getBackendName() may say another name
  bool connects_late = false;  // it uses its store after make(), in the first collective
  bool (*is_connected)(c10d::Backend&) = nullptr;  // null: once it is made
  // Names a setting that all ranks must have alike, such as a variable; null or "": none.
  std::string (*claim)() = nullptr;
  // Each rank uses one device of its own, which is current when make() runs.
  bool picks_device = false;
  std::string why_unusable;                       // with any device, as without a part of LibTorch
  std::string (*device_id)(int index) = nullptr;  // identifies a device in the whole world
};

/// All backends, in the order in which messages list them. They stay where they are.
std::vector<const RegisteredBackend*> all();

/// The backend with that name; null if there is none.
const RegisteredBackend* find(const std::string& name);

/// A backend of a group, and what is known of it.
struct ServedBackend {
  BackendPtr backend;
  const RegisteredBackend* description = nullptr;  // null: it is not registered
  BackendCapabilities capabilities = {};           // of the description
  CollectiveRunner* runner = nullptr;              // the backend; null: a class of c10d's own
};

/// \param name  that it is registered by; "": its getBackendName() says it.
ServedBackend served(BackendPtr backend, const std::string& name = "");

/// Adds a backend. If `replaces_missing`, one of that name that has no make() is replaced.
///
/// \return  false if the name is taken.
bool add(RegisteredBackend backend, bool replaces_missing = false);

}  // namespace ddp::backends
