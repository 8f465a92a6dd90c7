#include "sharded/copies/host_copies.h"

#include <map>
#include <mutex>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

enum class Way { Up, Down };

/// The same for all units, since a device has few streams.
c10::Stream copy_stream(c10::Device device, Way way) {
  static std::mutex mutex;
  static auto* const streams = new std::map<std::pair<c10::DeviceIndex, Way>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const std::pair key(device.index(), way);
  auto known = streams->find(key);
  if (known == streams->end()) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    known = streams->emplace(key, backend.getStreamFromGlobalPool(device)).first;
  }
  return known->second;
}

/// The stream, which waits for what the current one has to do.
c10::Stream stream_after_current(c10::Device device, Way way) {
  const auto stream = copy_stream(device, way);
  c10::Event before(device.type());
  before.record(current_stream_of(device));
  before.block(stream);
  return stream;
}

}  // namespace

at::Tensor pinned_memory(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::dtype(dtype).device(at::kCPU).pinned_memory(true));
}

UploadGuard::UploadGuard(c10::Device device) : guard_(stream_after_current(device, Way::Up)) {}

void CopyEnd::record(c10::Device device) {
  event_.emplace(device.type());
  event_->record(current_stream_of(device));
}

void CopyEnd::block(c10::Device device) const {
  if (event_) event_->block(current_stream_of(device));
}

void CopyEnd::await() {
  if (event_) event_->synchronize();
  event_.reset();
}

at::Tensor copy_down(const at::Tensor& values, CopyEnd& end) {
  const c10::NoGradGuard no_grad;
  const auto device = values.device();
  auto host = pinned_memory(values.numel(), values.scalar_type());
  const c10::StreamGuard guard(stream_after_current(device, Way::Down));
  host.copy_(values.view({-1}), /*non_blocking=*/true);
  end.record(device);
  record_use(values);  // by the stream of the copy, which outlasts the caller's reference
  return host;
}

}  // namespace ddp
