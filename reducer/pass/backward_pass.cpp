#include "pass/backward_pass.h"

#include <algorithm>

namespace ddp {

void BackwardPass::begin(
    int64_t number, const BucketSet& buckets, const std::vector<uint32_t>& expected) {
  number_ = number;
  if (bucket_count_ != buckets.size()) {
    bucket_count_ = buckets.size();
    buckets_ = std::make_unique<BucketState[]>(bucket_count_);
  }
  slots_.resize(expected.size());
  for (size_t b = 0; b < bucket_count_; ++b) {
    buckets_[b].reduced.reset();
    buckets_[b].in_flight = {};
    uint32_t pending = 0;
    for (const size_t parameter : buckets[b].indices()) {
      const auto gradients = expected[parameter];
      slots_[parameter] = {static_cast<uint32_t>(b), 0, gradients, gradients == 0};
      pending += gradients == 0 ? 0 : 1;
    }
    buckets_[b].pending = pending;
  }
  next_bucket = 0;
  launch_requests = 1;
}

void BackwardPass::mark_unused(size_t parameter) {
  auto& slot = slots_[parameter];
  if (slot.ready) return;
  slot.ready = true;
  --buckets_[slot.bucket].pending;
}

bool BackwardPass::is_complete() const {
  return std::all_of(buckets_.get(), buckets_.get() + bucket_count_, [](const auto& bucket) {
    return bucket.pending == 0;
  });
}

}  // namespace ddp
