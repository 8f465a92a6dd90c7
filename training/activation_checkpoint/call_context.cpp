#include "call_context.h"

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <ddp/internal/random_state.h>
#include <ddp/internal/random_streams.h>

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
    : with_random_numbers_(with_random_numbers), autocast_(enabled_autocast()) {
  if (!with_random_numbers) return;
  const auto note = [&](const at::Generator& generator) {
    generators_.emplace_back(generator, generator_state(generator));
  };
  note(at::globalContext().defaultGenerator(at::kCPU));
  for (const auto& device : devices) note(at::globalContext().defaultGenerator(device));
  for (const auto& stream : random_streams()) note(stream);
}

bool CallContext::has_noted(const at::Generator& generator) const {
  return std::any_of(generators_.begin(), generators_.end(), [&](const auto& noted) {
    return noted.first == generator;
  });
}

CallContext::Restored::Restored(const CallContext& context) {
  for (const auto& [generator, state] : context.generators_) {
    generators_before_.emplace_back(generator, generator_state(generator));
    set_generator_state(generator, state);
  }
  for (auto stream : random_streams()) {
    if (!context.with_random_numbers_ || context.has_noted(stream)) continue;
    // The call made it, so that it began with its seed.
    generators_before_.emplace_back(stream, generator_state(stream));
    stream.set_current_seed(stream.current_seed());
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
