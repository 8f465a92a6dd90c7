// Moves gradients out of a bucket after its reduction, and into new buckets after a rebuild.
#include "buckets/bucket.h"
#include "gradients/gradient_copy.h"
#include "gradients/sparse_gradient.h"

namespace ddp {

void Bucket::unpack(const at::Tensor& reduced, const std::vector<char>& keep) {
  if (pack_skipped_) return;
  const auto is_kept = [&](size_t slot) { return !keep.empty() && keep[indices_[slot]]; };
  if (sparse_) {
    if (!is_kept(0)) unpack_sparse(parameters_.front(), reduced);
    packed_.reset();
    return;
  }
  for (auto& [slot, direct] : direct_) direct.unpack(is_kept(slot));
  placement_->receive(storage_, reduced);
  auto copies = make_copies(1.0);
  for (size_t packed = 0; packed < packed_slots_.size(); ++packed) {
    prefetch_after(packed);
    const auto& parameter = packed_parameters_[packed];
    if (!is_kept(packed_slots_[packed])) {
      placement_->put(parameter.mutable_grad(), storage_, packed, reduced, copies);
    } else if (saved_[packed].defined()) {
      copies.copy(storage_.views()[packed], saved_[packed]);
    }
  }
  copies.finish();
  saved_.assign(packed_slots_.size(), at::Tensor());
}

void Bucket::move_in() {
  if (!sparse_) placement_->move_in(storage_, packed_parameters_);
}

}  // namespace ddp
