#include "bucket_storage.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

namespace ddp {
namespace {

// Aliases `flat` without being an autograd view of it: optimizers call `detach_()` on gradients in
// `zero_grad()`, which a view refuses.
at::Tensor alias(const at::Tensor& flat, int64_t offset, const at::Tensor& shape) {
  auto view = at::empty({0}, flat.options());
  const auto begin = flat.storage_offset() + offset;
  if (shape.is_non_overlapping_and_dense()) {
    view.set_(flat.storage(), begin, shape.sizes(), shape.strides());
  } else {
    view.set_(flat.storage(), begin, shape.sizes(), c10::contiguous_strides(shape.sizes()));
  }
  return view;
}

}  // namespace

BucketStorage::BucketStorage(
    const std::vector<at::Tensor>& parameters, int64_t tail, const at::TensorOptions& options,
    const Allocate& allocate) {
  int64_t numel = 0;
  for (const auto& parameter : parameters) numel += parameter.numel();
  all_ = allocate(numel + tail, options);
  gradients_ = all_.narrow(0, 0, numel);
  tail_ = all_.narrow(0, numel, tail);
  // Backends sum real numbers; a sum of complex numbers is the sum of their parts.
  wire_ = all_.is_complex() ? at::view_as_real(all_) : all_;
  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    views_.push_back(alias(all_, offset, parameter));
    addresses_.push_back(views_.back().const_data_ptr());
    offset += parameter.numel();
  }
}

at::Tensor BucketStorage::view_into(const at::Tensor& flat, size_t slot) const {
  if (flat.const_data_ptr() == all_.const_data_ptr()) return views_[slot];
  return alias(flat, views_[slot].storage_offset() - all_.storage_offset(), views_[slot]);
}

}  // namespace ddp
