#include "call_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/random_streams.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/tensor_broadcast.h>

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

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

at::Tensor copy_of(const at::Tensor& tensor) { return tensor.variable_data().clone(); }

// Writes through data() leave no version. On an accelerator the host would wait for the values.
bool may_compare(const at::Tensor& buffer) {
  return buffer.is_cpu() && buffer.layout() == at::kStrided;
}

void put(const at::Tensor& value, const at::Tensor& buffer) {
  const bool fits = buffer.sizes() == value.sizes() && buffer.dtype() == value.dtype();
  fits ? overwrite_unversioned(buffer, value) : buffer.set_data(value);
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
  return any_of(generators_, [&](const auto& noted) { return noted.first == generator; });
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
  for (const auto& [generator, state] : generators_before_) set_generator_state(generator, state);
}

CallBuffers::CallBuffers(
    const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names,
    std::vector<at::Tensor> statistics)
    : statistics_(std::move(statistics)) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    found_.push_back({buffers[i], names[i], version_of(buffers[i]), copy_of(buffers[i])});
  }
}

void CallBuffers::end_call() {
  for (auto& [buffer, name, version, value] : found_) {
    const bool is_unchanged =
        version_of(buffer) == version && (!may_compare(buffer) || have_equal_bytes(buffer, value));
    if (is_unchanged) value.reset();
  }
}

bool CallBuffers::has_statistics(const at::Tensor& tensor) const {
  return any_of(statistics_, [&](const at::Tensor& known) { return known.is_same(tensor); });
}

CallBuffers::Restored::Restored(const CallBuffers& call) {
  for (const auto& found : call.found_) {
    DDP_CHECK(
        found.value.defined() || version_of(found.buffer) == found.version,
        "checkpoint: expected buffer ", found.name,
        " as it was in forward, got one that was modified by an inplace operation. Write it before "
        "forward or after backward.");
  }
  const auto note = [&](const at::Tensor& buffer) {
    before_.push_back({buffer, version_of(buffer), copy_of(buffer)});
  };
  for (const auto& found : call.found_) note(found.buffer);
  for (const auto& tensor : call.statistics_) note(tensor);
  for (const auto& found : call.found_) {
    if (found.value.defined()) put(found.value, found.buffer);
  }
}

CallBuffers::Restored::~Restored() {
  for (const auto& [buffer, version, value] : before_) {
    const bool is_unchanged = version_of(buffer) == version && may_compare(buffer) &&
                              buffer.sizes() == value.sizes() && buffer.dtype() == value.dtype() &&
                              have_equal_bytes(buffer, value);
    if (is_unchanged) continue;
    // A destructor must not throw. A write to a buffer that overlaps itself does: it stays as it
    // is.
    problem_of([&, &buffer = buffer, &value = value] { put(value, buffer); });
    if (buffer.is_inference()) continue;
    auto counter = buffer.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
}

}  // namespace ddp
