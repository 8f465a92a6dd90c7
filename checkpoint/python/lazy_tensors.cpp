#include "python/lazy_tensors.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace ddp {

at::Tensor LazyTensors::add(const TensorKind& kind, Read read) {
  const auto elements = c10::multiply_integers(kind.sizes);
  const auto bytes = elements * static_cast<int64_t>(c10::elementSize(kind.dtype));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr,
      /*resizable=*/false);
  reads_[storage.unsafeGetStorageImpl()] = std::move(read);
  auto placeholder = at::empty({0}, kind.dtype);
  return placeholder.set_(storage, 0, kind.sizes, c10::contiguous_strides(kind.sizes));
}

at::Tensor LazyTensors::read(const at::Tensor& placeholder) const {
  const auto found = reads_.find(placeholder.storage().unsafeGetStorageImpl());
  if (found == reads_.end()) return {};
  auto tensor = found->second();
  TORCH_INTERNAL_ASSERT(
      tensor.is_cpu() && tensor.is_contiguous() && tensor.sizes() == placeholder.sizes() &&
      tensor.scalar_type() == placeholder.scalar_type());
  return tensor;
}

}  // namespace ddp
