#include "gradients/bucket_storage.h"

#include <algorithm>

#include <ddp/internal/as_real.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

// The first slot of an element at or after `offset`, in elements of `size` bytes.
int64_t slot_after(int64_t offset, int64_t size, int64_t slot_bytes) {
  const auto step = std::max<int64_t>(slot_bytes / size, 1);
  return (offset + step - 1) / step * step;
}

}  // namespace

int64_t BucketStorage::numel_of(const std::vector<at::Tensor>& parameters, int64_t slot_bytes) {
  int64_t end = 0;
  for (const auto& p : parameters) {
    end = slot_after(end, static_cast<int64_t>(p.element_size()), slot_bytes) + p.numel();
  }
  return end;
}

BucketStorage::BucketStorage(
    const std::vector<at::Tensor>& parameters, int64_t tail, const at::TensorOptions& options,
    const Allocate& allocate, int64_t slot_bytes) {
  const auto numel = numel_of(parameters, slot_bytes);
  all_ = allocate(numel + tail, options);
  // Padding is reduced with the gradients, so it must be numbers: NCCL may look for NaN.
  if (numel != numel_of(parameters, /*slot_bytes=*/1)) all_.zero_();
  gradients_ = all_.narrow(0, 0, numel);
  tail_ = all_.narrow(0, numel, tail);
  // Backends sum real numbers; a sum of complex numbers is the sum of their parts.
  wire_ = as_real(all_);
  const auto size = static_cast<int64_t>(all_.element_size());
  int64_t end = 0;
  for (const auto& parameter : parameters) {
    const auto begin = slot_after(end, size, slot_bytes);
    views_.push_back(
        alias(all_, all_.storage_offset() + begin, parameter.sizes(), gradient_strides(parameter)));
    addresses_.push_back(views_.back().const_data_ptr());
    end = begin + parameter.numel();
  }
}

at::Tensor BucketStorage::view_into(const at::Tensor& flat, size_t slot) const {
  if (flat.const_data_ptr() == all_.const_data_ptr()) return views_[slot];
  const auto& view = views_[slot];
  const auto offset = view.storage_offset() - all_.storage_offset();
  return alias(flat, flat.storage_offset() + offset, view.sizes(), view.strides());
}

}  // namespace ddp
