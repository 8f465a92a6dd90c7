// The backends that the library supports.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "backends/gpu_assignment.h"
#include "setup.h"

namespace ddp::backends {

/// The properties of a backend. Each backend's own file describes it.
struct BackendDescription {
  std::string name;                  // in ProcessGroupOptions' backend(), and getBackendName()
  std::vector<std::string> devices;  // whose tensors it carries: "cpu", "cuda"
  bool is_default = false;           // backend("") chooses it for its devices
  BackendCapabilities (*capabilities)() = nullptr;
  // The memory of one of its backends; null if it has none.
  std::shared_ptr<GradientMemory> (*gradient_memory)(c10d::Backend&) = nullptr;
  BackendPtr (*make)(const Setup&) = nullptr;  // null: no build has it
  std::string why_no_build;                    // a sentence, if make is null
  // For a backend that needs one GPU per rank. Null for the others.
  GpuAssignment (*find_gpu)(
      const std::optional<Setting>& local_rank,
      const std::optional<c10::Device>& device_id) = nullptr;
  void (*use_gpu)(int index) = nullptr;
};

/// All backends, in the order in which messages list them.
const std::vector<BackendDescription>& all();

/// The backend with that name; null if there is none.
const BackendDescription* find(const std::string& name);

}  // namespace ddp::backends
