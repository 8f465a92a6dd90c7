#include "bucket_set.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/capabilities.h>

#include "relocated_gradients.h"
#include "viewed_gradients.h"

namespace ddp {
namespace {

// From the backend where it has memory of its own to reduce in, without copies in and out.
at::Tensor allocate(c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
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
  for (size_t b = 0; b < plan.size(); ++b) {
    const bool last = b + 1 == plan.size();
    buckets_.emplace_back(
        parameters_, std::move(plan[b]), last ? tail_ : 0, make_placement(),
        [group = group_](int64_t numel, const at::TensorOptions& options) {
          return allocate(*group, numel, options);
        });
  }
  if (!is_rebuild) return;
  for (auto& bucket : buckets_) bucket.move_in();
}

std::unique_ptr<GradientPlacement> BucketSet::make_placement() const {
  if (as_views_) return std::make_unique<ViewedGradients>();
  return std::make_unique<RelocatedGradients>(copies_only_);
}

void BucketSet::copy_only() {
  copies_only_ = true;
  for (auto& bucket : buckets_) bucket.copy_only();
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
    if (!bucket.is_sparse()) bytes += static_cast<int64_t>(bucket.storage().all().nbytes());
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
