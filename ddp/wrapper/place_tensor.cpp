// Moves the inputs of forward to the model's device.
#include <ddp/move_tensors.h>

namespace ddp::detail {
namespace {

// Whether a copy to `device` can leave the host free: not of what autograd records, for it does not
// record that memory is pinned.
bool can_go_through_pinned(const at::Tensor& t, const std::optional<c10::Device>& device) {
  return device && device->is_cuda() && t.is_cpu() && t.layout() == at::kStrided &&
         !t.requires_grad();
}

}  // namespace

at::Tensor InputPlacement::placed_tensor(const at::Tensor& t) const {
  auto options = t.options();
  if (device) options = options.device(*device);
  if (floating_dtype && t.is_floating_point()) options = options.dtype(*floating_dtype);
  if (!can_go_through_pinned(t, device)) return t.to(options);
  // Dense memory keeps its order, such as channels_last, as in a plain to().
  const auto dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
  const auto pinned = dense.is_pinned() ? dense : dense.pin_memory();
  // Another dtype after the copy: before it, it would make memory that is not pinned.
  return pinned.to(*device, /*non_blocking=*/true).to(options);
}

}  // namespace ddp::detail
