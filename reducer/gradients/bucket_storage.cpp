#include "gradients/bucket_storage.h"

#include <ddp/internal/as_real.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
BucketStorage::BucketStorage(
    const std::vector<at::Tensor>& parameters, int64_t tail, const at::TensorOptions& options,
    const Allocate& allocate) {
  int64_t numel = 0;
  for (const auto& parameter : parameters) numel += parameter.numel();
  all_ = allocate(numel + tail, options);
  gradients_ = all_.narrow(0, 0, numel);
  tail_ = all_.narrow(0, numel, tail);
  // Backends sum real numbers; a sum of complex numbers is the sum of their parts.
  wire_ = as_real(all_);
  int64_t offset = all_.storage_offset();
  for (const auto& parameter : parameters) {
    views_.push_back(alias(all_, offset, parameter.sizes(), gradient_strides(parameter)));
    addresses_.push_back(views_.back().const_data_ptr());
    offset += parameter.numel();
  }
}

at::Tensor BucketStorage::view_into(const at::Tensor& flat, size_t slot) const {
  if (flat.const_data_ptr() == all_.const_data_ptr()) return views_[slot];
  const auto& view = views_[slot];
  const auto offset = view.storage_offset() - all_.storage_offset();
  return alias(flat, flat.storage_offset() + offset, view.sizes(), view.strides());
}

}  // namespace ddp
