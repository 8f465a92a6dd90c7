#include "sharded/copies/host_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/side_stream.h>

namespace ddp {

at::Tensor pinned_memory(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::dtype(dtype).device(at::kCPU).pinned_memory(true));
}

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
  const SideStreamGuard guard(device, SideStream::Downloads);
  host.copy_(values.view({-1}), /*non_blocking=*/true);
  end.record(device);
  record_use(values);  // by the stream of the copy, which outlasts the caller's reference
  return host;
}

}  // namespace ddp
