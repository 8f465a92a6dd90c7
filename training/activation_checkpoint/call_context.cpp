#include "call_context.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <ddp/internal/random_state.h>

namespace ddp {

namespace {

std::vector<std::pair<c10::DeviceType, at::ScalarType>> enabled_autocast() {
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> enabled;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device)) {
      enabled.emplace_back(device, at::autocast::get_autocast_dtype(device));
    }
  }
  return enabled;
}

}  // namespace

CallContext::CallContext(const std::vector<c10::Device>& devices, bool with_random_numbers)
    : autocast_(enabled_autocast()) {
  const auto note = [&](const c10::Device& device) {
    const auto& generator = at::globalContext().defaultGenerator(device);
    generators_.emplace_back(generator, generator_state(generator));
  };
  if (with_random_numbers) {
    note(at::kCPU);
    for (const auto& device : devices) note(device);
  }
}

CallContext::Restored::Restored(const CallContext& context) {
  for (const auto& [generator, state] : context.generators_) {
    generators_before_.emplace_back(generator, generator_state(generator));
    set_generator_state(generator, state);
  }
  const auto enter = [&](c10::DeviceType device, const AutocastOptions& options) {
    // A cached cast would have the graph of this scope; where backward is called within an autocast
    // region, later operations of the region would find it.
    autocast_.emplace_front(device, AutocastOptions(options).cache_enabled(false));
  };
  for (const auto& [device, dtype] : enabled_autocast()) {
    enter(device, AutocastOptions(dtype).enabled(false));
  }
  for (const auto& [device, dtype] : context.autocast_) enter(device, dtype);
}

CallContext::Restored::~Restored() {
  for (const auto& [generator, state] : generators_before_) {
    set_generator_state(generator, state);
  }
}

}  // namespace ddp
