// What a group's backends can do.
#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "backends/registry.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

/// The group's backend for a type of devices, and its properties: null if it is not registered.
struct Served {
  c10::intrusive_ptr<c10d::Backend> backend;
  const backends::RegisteredBackend* description;
};

Served serving(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto backend = group.getBackend(device);
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  const auto registered = own ? own->registered_name(device) : "";
  return {backend, backends::find(registered.empty() ? backend->getBackendName() : registered)};
}

}  // namespace

BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto [backend, description] = serving(group, device.type());
  auto capabilities = description ? description->capabilities() : BackendCapabilities();
  capabilities.reduces_in_own_memory =
      capabilities.reduces_in_own_memory && backend->supportsTensorAlloc(device.index());
  capabilities.has_own_memory =
      capabilities.reduces_in_own_memory &&
      (!description || !description->is_connected || description->is_connected(*backend));
  return capabilities;
}

std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto [backend, description] = serving(group, device.type());
  if (!description || !description->gradient_memory) return nullptr;
  return description->gradient_memory(*backend);
}

}  // namespace ddp
