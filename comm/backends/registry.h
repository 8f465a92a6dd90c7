// The backends that groups can be made of: the library's, and those that a program has registered.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "setup.h"

namespace ddp::backends {

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

/// A backend of a group, and what the registry knows of it.
struct ServedBackend {
  BackendPtr backend;
  const RegisteredBackend* description = nullptr;  // null: it is not registered
  BackendCapabilities capabilities = {};           // of the description
};

/// \param name  that it is registered by; "": its getBackendName() says it.
ServedBackend served(BackendPtr backend, const std::string& name = "");

/// Adds a backend. If `replaces_missing`, one of that name that has no make() is replaced.
///
/// \return  false if the name is taken.
bool add(RegisteredBackend backend, bool replaces_missing = false);

}  // namespace ddp::backends
