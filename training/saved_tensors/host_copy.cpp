#include "saved_tensors/host_copy.h"

#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

/// Where the tensor has gaps or overlaps, contiguous.
at::Tensor memory_like(const at::Tensor& tensor, const at::TensorOptions& options) {
  return tensor.is_non_overlapping_and_dense()
             ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
             : at::empty(tensor.sizes(), options);
}

struct HostCopy {
  at::Tensor values;  // on the host
  c10::Device device;
  std::optional<c10::Event> arrived;
};

}  // namespace

bool can_be_replaced(const at::Tensor& tensor) {
  // Linear saves its weight as a view.
  const auto& base = tensor.is_view() ? tensor._base() : tensor;
  return tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !(base.is_leaf() && base.requires_grad());
}

UnpackFunction copy_to_host(const at::Tensor& tensor) {
  const auto device = tensor.device();
  const bool is_accelerator = !device.is_cpu();
  auto copy = std::make_shared<HostCopy>(HostCopy{
      memory_like(tensor, tensor.options().device(at::kCPU).pinned_memory(is_accelerator)), device,
      std::nullopt});
  copy->values.copy_(tensor, /*non_blocking=*/is_accelerator);
  if (is_accelerator) {
    record_use(tensor);
    copy->arrived.emplace(device.type());
    copy->arrived->record(current_stream_of(device));
  }
  return [copy] {
    if (copy->arrived) copy->arrived->block(current_stream_of(copy->device));
    auto back =
        memory_like(copy->values, copy->values.options().device(copy->device).pinned_memory(false));
    back.copy_(copy->values, /*non_blocking=*/copy->arrived.has_value());
    return back;
  };
}

}  // namespace ddp
