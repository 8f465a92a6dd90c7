// The capabilities of a group's backends.
#include <ddp/internal/capabilities.h>
#include <ddp/internal/gradient_memory.h>

#include "backends/registry.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

using backends::ServedBackend;

/// The capabilities of a group's backend now: it may have connected since.
BackendCapabilities capabilities_now(const ServedBackend& served, c10::Device device) {
  const auto& [backend, description, described] = served;
  auto capabilities = described;
  capabilities.reduces_in_own_memory =
      capabilities.reduces_in_own_memory && backend->supportsTensorAlloc(device.index());
  capabilities.has_own_memory =
      capabilities.reduces_in_own_memory &&
      (!description || !description->is_connected || description->is_connected(*backend));
  return capabilities;
}

std::shared_ptr<GradientMemory> memory_of(const ServedBackend& served) {
  const auto* description = served.description;
  if (!description || !description->gradient_memory) return nullptr;
  return description->gradient_memory(*served.backend);
}

}  // namespace

BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto type = device.type();
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  return own ? capabilities_now(own->serving(type), device)
             : capabilities_now(backends::served(group.getBackend(type)), device);
}

std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto type = device.type();
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  return own ? memory_of(own->serving(type)) : memory_of(backends::served(group.getBackend(type)));
}

}  // namespace ddp
