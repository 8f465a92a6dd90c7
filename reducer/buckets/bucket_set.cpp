#include "buckets/bucket_set.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ddp/internal/parameter_memory.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/tensor_memory.h>

#include "gradients/sharded_gradients.h"

namespace ddp {
namespace {

// The bytes that a kernel of a GPU reads and writes at once, where addresses allow it.
constexpr int64_t kSlotBytes = 16;

FlatLayout layout_of(
    const std::vector<size_t>& bucket, const std::vector<NamedParameter>& parameters, int ranks) {
  std::vector<int64_t> numels;
  for (const size_t index : bucket) numels.push_back(parameters[index].tensor.numel());
  return {numels, ranks};
}

}  // namespace

BucketSet::BucketSet(
    std::vector<NamedParameter> parameters, ProcessGroup group, bool as_views, bool lazy,
    int64_t tail)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      as_views_(as_views),
      lazy_(lazy),
      tail_(tail),
      leaves_gaps_(!on_cpu()) {
  const auto device = parameters_.front().tensor.device();
  spans_devices_ = any_of(parameters_, [&](const auto& p) { return p.tensor.device() != device; });
  if (group_->getSize() > 1 && !as_views_) memory_ = gradient_memory_of(*group_, device);
}

void BucketSet::build(std::vector<std::vector<size_t>> plan) {
  const at::NoGradGuard no_grad;
  const bool is_rebuild = !buckets_.empty();
  const auto allocate = make_allocator(plan);
  for (const auto& bucket : buckets_) bucket.record_use();
  buckets_.clear();
  buckets_.reserve(plan.size());
  for (size_t b = 0; b < plan.size(); ++b) {
    const auto tail = tail_of(plan[b], /*is_last=*/b + 1 == plan.size());
    buckets_.emplace_back(
        parameters_, std::move(plan[b]), tail, make_placement(b), allocate, memory_,
        leaves_gaps_ ? kSlotBytes : 1);
    if (!is_lazy()) buckets_.back().allocate();
  }
  std::set<size_t> sizes;
  for (const auto& bucket : buckets_) {
    for (const size_t size : bucket.direct_sizes()) sizes.insert(size);
  }
  direct_sizes_.assign(sizes.begin(), sizes.end());
  // Gradients that are views into lazy buckets keep the old memory until the next pass packs them.
  if (!is_rebuild || is_lazy()) return;
  for (auto& bucket : buckets_) bucket.move_in();
}

// Elements for the status; or padding, so that all ranks' shards have the same size.
int64_t BucketSet::tail_of(const std::vector<size_t>& bucket, bool is_last) const {
  if (!shards_) return is_last ? tail_ : 0;
  return layout_of(bucket, parameters_, group_->getSize()).padding();
}

BucketStorage::Allocate BucketSet::make_allocator(
    const std::vector<std::vector<size_t>>& plan) const {
  if (!shards_) {
    return [this](int64_t numel, const at::TensorOptions& options) {
      const MemoryScope of_bucket(MemoryKind::Buckets);
      return reducible_memory(*group_, numel, options);
    };
  }
  int64_t largest = 0;
  for (const auto& bucket : plan) {
    largest = std::max(largest, layout_of(bucket, parameters_, group_->getSize()).numel());
  }
  // The buckets have it in turns, in the order in which build() allocates them.
  struct Shared {
    std::map<std::tuple<c10::ScalarType, c10::DeviceIndex, size_t>, at::Tensor> memory;
    size_t bucket = 0;
  };
  const auto shared = std::make_shared<Shared>();
  return [this, largest, shared](int64_t numel, const at::TensorOptions& options) {
    const MemoryScope of_bucket(MemoryKind::Buckets);
    const auto turn = shared->bucket++ % buffers_;
    auto& memory = shared->memory[{options.dtype().toScalarType(), options.device().index(), turn}];
    if (!memory.defined()) memory = reducible_memory(*group_, largest, options).zero_();
    return memory.narrow(0, 0, numel);
  };
}

void BucketSet::shard(
    std::vector<std::vector<size_t>> plan, std::shared_ptr<GradientShards> shards, size_t buffers) {
  shards_ = std::move(shards);
  buffers_ = buffers;
  memory_ = nullptr;
  leaves_gaps_ = false;
  shards_->clear();
  for (const auto& bucket : plan) {
    const auto layout = layout_of(bucket, parameters_, group_->getSize());
    const auto& first = parameters_[bucket.front()].tensor;
    auto& shard = shards_->emplace_back();
    shard.average =
        at::zeros({layout.shard_numel}, at::dtype(first.scalar_type()).device(first.device()));
    shard.pieces = layout.pieces(group_->getRank());
    shard.arrived.assign(bucket.size(), 0);
  }
  build(std::move(plan));
}

std::unique_ptr<GradientPlacement> BucketSet::make_placement(size_t b) const {
  if (shards_) return make_sharded_gradients((*shards_)[b]);
  return as_views_ ? make_viewed_gradients() : make_copied_gradients();
}

void BucketSet::pack_all() {
  const bool was_packed = !memory_ && !leaves_gaps_;
  memory_ = nullptr;
  leaves_gaps_ = false;
  if (!was_packed) build(indices());
}

void BucketSet::release() {
  for (auto& bucket : buckets_) {
    bucket.record_use();
    bucket.release();
  }
}

std::shared_ptr<void> BucketSet::use_gradient_memory() const {
  return memory_ && !direct_sizes_.empty() ? memory_->serve(direct_sizes_) : nullptr;
}

std::vector<std::vector<size_t>> BucketSet::indices() const {
  return c10::fmap(buckets_, [](const auto& bucket) { return bucket.indices(); });
}

int64_t BucketSet::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) bytes += bucket.bytes();
  return bytes;
}

int64_t BucketSet::storage_bytes() const {
  int64_t bytes = 0;
  std::set<const void*> shared;
  for (const auto& bucket : buckets_) {
    const auto& memory = bucket.storage().all();
    if (!shards_) {
      bytes += bucket.storage_bytes();
    } else if (shared.insert(memory.const_data_ptr()).second) {
      bytes += static_cast<int64_t>(memory.storage().nbytes());
    }
  }
  return bytes;
}

}  // namespace ddp
