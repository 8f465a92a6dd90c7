#include "bucket_set.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/capabilities.h>

namespace ddp {
namespace {

// From the backend where it has memory of its own to reduce in, without copies in and out.
at::Tensor make_storage(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  if (group.getSize() > 1 && capabilities_of(group, options.device()).reduces_in_own_memory) {
    return group.getBackend(options.device().type())->allocateTensor(numel, options);
  }
  return at::empty({numel}, options);
}

}  // namespace

BucketSet::BucketSet(
    std::vector<NamedParameter> parameters, ProcessGroup group, bool as_views, int64_t tail)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      as_views_(as_views),
      tail_(tail) {}

void BucketSet::build(std::vector<std::vector<size_t>> plan) {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) bucket.move_out();
  const bool is_rebuild = !buckets_.empty();
  buckets_.clear();
  buckets_.reserve(plan.size());
  const auto placement = as_views_ ? Bucket::Placement::View : Bucket::Placement::Owned;
  for (size_t b = 0; b < plan.size(); ++b) {
    const bool last = b + 1 == plan.size();
    buckets_.emplace_back(
        parameters_, std::move(plan[b]), last ? tail_ : 0, placement,
        [group = group_](int64_t numel, const at::TensorOptions& options) {
          return make_storage(*group, numel, options);
        });
    if (keeps_out_) buckets_.back().keep_out();
  }
  if (!is_rebuild || !as_views_) return;
  for (auto& bucket : buckets_) bucket.adopt_gradients();
}

void BucketSet::keep_out() {
  keeps_out_ = true;
  for (auto& bucket : buckets_) bucket.keep_out();
}

std::vector<std::vector<size_t>> BucketSet::indices() const {
  std::vector<std::vector<size_t>> indices;
  for (const auto& bucket : buckets_) indices.push_back(bucket.indices());
  return indices;
}

int64_t BucketSet::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) bytes += bucket.bytes();
  return bytes;
}

int64_t BucketSet::storage_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    if (!bucket.is_sparse()) bytes += static_cast<int64_t>(bucket.storage().nbytes());
  }
  return bytes;
}

std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters) {
  std::vector<ParameterExtent> extents;
  for (const auto& p : parameters) {
    extents.push_back(
        {static_cast<int64_t>(p.tensor.nbytes()), p.tensor.scalar_type(), p.tensor.device(),
         p.expect_sparse});
  }
  return extents;
}

}  // namespace ddp
