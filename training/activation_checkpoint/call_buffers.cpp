#include "call_buffers.h"

#include <algorithm>

#include <ddp/internal/check.h>
#include <ddp/internal/tensor_broadcast.h>

namespace ddp {
namespace {

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
  return std::any_of(statistics_.begin(), statistics_.end(), [&](const at::Tensor& known) {
    return known.is_same(tensor);
  });
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
