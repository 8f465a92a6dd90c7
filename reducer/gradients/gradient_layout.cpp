#include <ddp/internal/gradient_layout.h>

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

namespace ddp {

at::DimVector gradient_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return at::DimVector(parameter.strides());
  return c10::contiguous_strides(parameter.sizes());
}

at::Tensor alias(
    const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto other = at::empty({0}, memory.options());
  other.set_(memory.storage(), offset, sizes, strides);
  return other;
}

}  // namespace ddp
