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
    const std::vector<at::Tensor>& parameters, int64_t tail, Allocate allocate)
    : allocate_(std::move(allocate)) {
  for (const auto& parameter : parameters) numel_ += parameter.numel();
  const auto& first = parameters.front();
  all_ = allocate_(
      numel_ + tail, at::TensorOptions().dtype(first.scalar_type()).device(first.device()));
  lay_out(parameters);
}

void BucketStorage::reallocate() {
  all_ = allocate_(all_.numel(), all_.options());
  lay_out(std::exchange(views_, {}));
}

void BucketStorage::lay_out(const std::vector<at::Tensor>& shapes) {
  gradients_ = all_.narrow(0, 0, numel_);
  tail_ = all_.narrow(0, numel_, all_.numel() - numel_);
  // Backends sum real numbers; a sum of complex numbers is the sum of their parts.
  wire_ = all_.is_complex() ? at::view_as_real(all_) : all_;
  views_.clear();
  addresses_.clear();
  int64_t offset = 0;
  for (const auto& shape : shapes) {
    views_.push_back(alias(all_, offset, shape));
    addresses_.push_back(views_.back().const_data_ptr());
    offset += shape.numel();
  }
  own_tensors_ = static_cast<size_t>(all_.storage().use_count());
}

at::Tensor BucketStorage::view_into(const at::Tensor& flat, size_t slot) const {
  return alias(flat, views_[slot].storage_offset() - all_.storage_offset(), views_[slot]);
}

bool BucketStorage::contains(const at::Tensor& t) const {
  return t.layout() == at::kStrided &&
         t.storage().unsafeGetStorageImpl() == all_.storage().unsafeGetStorageImpl();
}

size_t BucketStorage::foreign_tensors() const {
  return static_cast<size_t>(all_.storage().use_count()) - own_tensors_;
}

}  // namespace ddp
