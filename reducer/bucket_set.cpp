#include "bucket_set.h"

#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/capabilities.h>

#include "copied_gradients.h"
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
      tail_(tail) {
  if (group_->getSize() > 1 && !as_views_) {
    memory_ = gradient_memory_of(*group_, parameters_.front().tensor.device());
  }
}

void BucketSet::build(std::vector<std::vector<size_t>> plan) {
  const at::NoGradGuard no_grad;
  const bool is_rebuild = !buckets_.empty();
  buckets_.clear();
  buckets_.reserve(plan.size());
  for (size_t b = 0; b < plan.size(); ++b) {
    const bool last = b + 1 == plan.size();
    buckets_.emplace_back(
        parameters_, std::move(plan[b]), last ? tail_ : 0, make_placement(),
        [&](int64_t numel, const at::TensorOptions& options) {
          return allocate(*group_, numel, options);
        },
        memory_);
  }
  std::set<size_t> sizes;
  for (const auto& bucket : buckets_) {
    for (const size_t size : bucket.direct_sizes()) sizes.insert(size);
  }
  direct_sizes_.assign(sizes.begin(), sizes.end());
  if (!is_rebuild) return;
  for (auto& bucket : buckets_) bucket.move_in();
}

std::unique_ptr<GradientPlacement> BucketSet::make_placement() const {
  if (as_views_) return std::make_unique<ViewedGradients>();
  return std::make_unique<CopiedGradients>();
}

void BucketSet::pack_all() {
  if (std::exchange(memory_, nullptr)) build(indices());
}

std::shared_ptr<void> BucketSet::serve_gradients() const {
  return memory_ && !direct_sizes_.empty() ? memory_->serve(direct_sizes_) : nullptr;
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
