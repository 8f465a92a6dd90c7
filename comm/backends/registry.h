// The backends that the library can be told to use.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "../gpu_assignment.h"
#include "setup.h"

namespace ddp::backends {

/// What the library knows of a backend. Each backend's own file describes it.
struct Description {
  std::string name;                  // in ProcessGroupOptions' backend(), and getBackendName()
  std::vector<std::string> devices;  // whose tensors it carries: "cpu", "cuda"
  bool is_default = false;           // backend("") chooses it for its devices
  BackendCapabilities (*capabilities)() = nullptr;
  // Of one of its backends; empty, or null, where there is none.
  std::shared_ptr<GradientMemory> (*gradient_memory)(c10d::Backend&) = nullptr;
  BackendPtr (*make)(const Setup&) = nullptr;  // empty: no build has it
  std::string why_no_build;                    // a sentence; for those without make()
  // For a backend whose ranks need a GPU each. Empty for the others.
  GpuAssignment (*find_gpu)(const std::optional<Setting>& local_rank) = nullptr;
  void (*use_gpu)(int index) = nullptr;
};

/// In the order in which messages list them.
const std::vector<Description>& all();

/// Nothing where there is none of that name.
const Description* find(const std::string& name);

}  // namespace ddp::backends
