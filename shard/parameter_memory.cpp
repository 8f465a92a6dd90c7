#include <ddp/internal/parameter_memory.h>

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/strides.h>
#include <ddp/internal/capabilities.h>

namespace ddp {

at::DimVector gradient_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return at::DimVector(parameter.strides());
  return c10::contiguous_strides(parameter.sizes());
}

at::Tensor memory_order_of(const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto strides = gradient_strides(parameter);
  const auto alike =
      tensor.strides() == at::IntArrayRef(strides)
          ? tensor
          : at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
  return alike.as_strided({tensor.numel()}, {1});
}

at::Tensor alias(
    const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto other = at::empty({0}, memory.options());
  other.set_(memory.storage(), offset, sizes, strides);
  return other;
}

at::Tensor reducible_memory(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  if (group.getSize() > 1 && capabilities_of(group, options.device()).has_own_memory) {
    return group.getBackend(options.device().type())->allocateTensor(numel, options);
  }
  return at::empty({numel}, options);
}

void release_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap({nullptr, tensor.device()});
  storage->set_nbytes(0);
}

void refill_memory(const at::Tensor& tensor, c10::DataPtr memory, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

void refill_memory(const at::Tensor& tensor, const at::Tensor& fresh) {
  auto* source = fresh.storage().unsafeGetStorageImpl();
  const auto bytes = source->nbytes();
  refill_memory(tensor, source->set_data_ptr({nullptr, tensor.device()}), bytes);
}

}  // namespace ddp
