#include "replay/repeat_scope.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/random_streams.h>
#include <ddp/internal/tensor_broadcast.h>

namespace ddp {
namespace {

std::vector<at::Generator> generators_of(c10::Device device) {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  for (const auto& stream : random_streams()) generators.push_back(stream);
  return generators;
}

// A write to a buffer that overlaps itself throws: such a one stays as it is.
bool is_writable_buffer(const at::Tensor& buffer) {
  return at::has_internal_overlap(buffer) != at::MemOverlap::Yes;
}

}  // namespace

std::vector<at::Tensor> surroundings_of(
    const std::vector<at::Tensor>& buffers, c10::Device device) {
  std::vector<at::Tensor> tensors;
  for (const auto& generator : generators_of(device)) tensors.push_back(generator_state(generator));
  for (const auto& buffer : buffers) tensors.push_back(buffer.detach());
  return tensors;
}

AutocastState AutocastState::current() {
  AutocastState state;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    state.devices.push_back(
        {device, at::autocast::is_autocast_enabled(device),
         at::autocast::get_autocast_dtype(device)});
  }
  return state;
}

// A cached cast has the graph of the pass that made it.
void AutocastState::set() const {
  at::autocast::clear_cache();
  for (const auto& [device, is_enabled, dtype] : devices) {
    at::autocast::set_autocast_enabled(device, is_enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }
}

RepeatScope::RepeatScope(
    const std::vector<at::Tensor>& surroundings, const AutocastState& autocast,
    const std::vector<at::Tensor>& buffers, c10::Device device)
    : autocast_(AutocastState::current()) {
  const auto generators = generators_of(device);
  DDP_CHECK(
      surroundings.size() == generators.size() + buffers.size(),
      "replay_every: expected as many random generators and buffers on every rank, got ",
      generators.size(), " and ", buffers.size(), " here, and ", surroundings.size(),
      " in all on the rank before.");
  for (const auto& generator : generators) {
    generators_.emplace_back(generator, generator_state(generator));
  }
  for (const auto& buffer : buffers) {
    buffers_.push_back({buffer, buffer.detach().clone(), static_cast<int64_t>(buffer._version())});
  }
  size_t next = 0;
  try {
    for (const auto& generator : generators) set_generator_state(generator, surroundings[next++]);
    for (const auto& buffer : buffers) {
      const auto& value = surroundings[next++];
      if (is_writable_buffer(buffer)) overwrite_unversioned(buffer, value);
    }
    autocast.set();
  } catch (...) {
    restore();
    throw;
  }
}

RepeatScope::~RepeatScope() { restore(); }

void RepeatScope::restore() const {
  for (const auto& [generator, state] : generators_) set_generator_state(generator, state);
  for (const auto& [buffer, value, version] : buffers_) {
    if (is_writable_buffer(buffer)) overwrite_unversioned(buffer, value);
    auto counter = buffer.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
  autocast_.set();
}

}  // namespace ddp
