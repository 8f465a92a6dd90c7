// What a group's backends can do.
#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "backends/registry.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

using Served = MonitoredGroup::Served;

Served serving(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (const auto* own = dynamic_cast<const MonitoredGroup*>(&group)) return own->serving(device);
  Served served{group.getBackend(device)};
  served.description = backends::find(served.backend->getBackendName());
  if (served.description) served.capabilities = served.description->capabilities();
  return served;
}

}  // namespace

BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto [backend, description, described] = serving(group, device.type());
  auto capabilities = described;
  capabilities.reduces_in_own_memory =
      capabilities.reduces_in_own_memory && backend->supportsTensorAlloc(device.index());
  capabilities.has_own_memory =
      capabilities.reduces_in_own_memory &&
      (!description || !description->is_connected || description->is_connected(*backend));
  return capabilities;
}

std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto [backend, description, _] = serving(group, device.type());
  if (!description || !description->gradient_memory) return nullptr;
  return description->gradient_memory(*backend);
}

}  // namespace ddp
