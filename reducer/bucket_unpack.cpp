// How gradients get out of a bucket: when they are reduced, and when the buckets change.
#include "bucket.h"
#include "gradient_copy.h"
#include "sparse_gradient.h"

namespace ddp {

void Bucket::unpack(const at::Tensor& reduced, const std::vector<char>& keep) {
  const auto is_kept = [&](size_t slot) { return !keep.empty() && keep[indices_[slot]]; };
  if (sparse_) {
    if (!is_kept(0)) unpack_sparse(parameters_.front(), reduced);
    packed_.reset();
    return;
  }
  placement_->receive(storage_, reduced);
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (!is_kept(slot)) {
      placement_->put(parameters_[slot].mutable_grad(), storage_, slot, reduced);
    } else if (remembered_[slot].defined()) {
      copy_scaled(storage_.views()[slot], remembered_[slot], 1.0);
    }
  }
  remembered_.assign(parameters_.size(), at::Tensor());
}

void Bucket::move_out() {
  if (!sparse_) placement_->move_out(storage_, parameters_);
}

void Bucket::move_in() {
  if (!sparse_) placement_->move_in(storage_, parameters_);
}

}  // namespace ddp
