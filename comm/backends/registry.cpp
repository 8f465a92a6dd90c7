#include "backends/registry.h"

#include <algorithm>

namespace ddp {
namespace backends {

// One line per backend, whose own file describes it.
#define DDP_BACKENDS(BACKEND) \
  BACKEND(gloo)               \
  BACKEND(shm)                \
  BACKEND(nccl)               \
  BACKEND(mpi)

#define DDP_DECLARE(name) BackendDescription describe_##name();
DDP_BACKENDS(DDP_DECLARE)
#undef DDP_DECLARE

const std::vector<BackendDescription>& all() {
#define DDP_DESCRIBE(name) describe_##name(),
  static const std::vector<BackendDescription> descriptions{DDP_BACKENDS(DDP_DESCRIBE)};
#undef DDP_DESCRIBE
  return descriptions;
}

const BackendDescription* find(const std::string& name) {
  const auto found = std::find_if(
      all().begin(), all().end(), [&](const auto& backend) { return backend.name == name; });
  return found == all().end() ? nullptr : &*found;
}

}  // namespace backends

BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto backend = group.getBackend(device.type());
  const auto* description = backends::find(backend->getBackendName());
  auto capabilities = description != nullptr ? description->capabilities() : BackendCapabilities();
  capabilities.reduces_in_own_memory =
      capabilities.reduces_in_own_memory && backend->supportsTensorAlloc(device.index());
  return capabilities;
}

std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto backend = group.getBackend(device.type());
  const auto* description = backends::find(backend->getBackendName());
  if (description == nullptr || !description->gradient_memory) return nullptr;
  return description->gradient_memory(*backend);
}

}  // namespace ddp
