#include "gradients/sharded_gradients.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/as_real.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

class ReduceScatter : public BucketReduction {
 public:
  ReduceScatter(
      ProcessGroup group, c10::Device device, std::shared_ptr<GradientShards> shards,
      size_t buffers)
      : group_(std::move(group)),
        shards_(std::move(shards)),
        buffers_(buffers),
        averages_(group_->getSize() > 1 && capabilities_of(*group_, device).averages) {}

  double scale_of(const Bucket& bucket, const std::optional<double>& scale) const override {
    if (averages(bucket, scale)) return 1;
    return scale.value_or(1.0 / group_->getSize());
  }

  // A rank would get only a part of the numbers after the gradients.
  bool carries_status(const Bucket& /*bucket*/) const override { return false; }

  size_t buffers() const override { return buffers_; }

  InFlight start(
      const Bucket& bucket, size_t index, bool /*is_last*/,
      const std::optional<double>& scale) override {
    auto& shard = (*shards_)[index];
    const bool adds = contains(shard.arrived, 1);
    if (adds) shard.previous = std::exchange(shard.average, at::empty_like(shard.average));
    const auto& memory = bucket.storage().all();
    if (group_->getSize() == 1) {
      shard.average.copy_(memory);
      return {};
    }
    c10d::ReduceScatterOptions options;
    if (averages(bucket, scale)) options.reduceOp = c10d::ReduceOp::AVG;
    auto output = as_real(shard.average).view({-1});
    auto input = as_real(memory).view({-1});
    return {group_->DDP_GROUP_REDUCE_SCATTER_SINGLE(output, input, options), {}};
  }

 private:
  bool averages(const Bucket& bucket, const std::optional<double>& scale) const {
    return averages_ && !scale &&
           averages_exactly(bucket.storage().all().scalar_type(), group_->getSize());
  }

  const ProcessGroup group_;
  const std::shared_ptr<GradientShards> shards_;
  const size_t buffers_;
  const bool averages_;  // the backend's reduce-scatter has an average
};

class ShardedGradients final : public GradientPlacement {
 public:
  explicit ShardedGradients(GradientShard& shard) : shard_(shard) {}

  void after_pack(at::Tensor& grad, const BucketStorage& /*storage*/, size_t /*slot*/) override {
    grad.reset();
  }

  void receive(const BucketStorage& /*storage*/, const at::Tensor& /*reduced*/) override {
    if (!shard_.previous.defined()) {
      std::fill(shard_.arrived.begin(), shard_.arrived.end(), char{0});
      return;
    }
    const auto previous = std::exchange(shard_.previous, {});
    for (const auto& piece : shard_.pieces) {
      if (!shard_.arrived[piece.slot]) continue;
      auto average = shard_.average.narrow(0, piece.at, piece.numel);
      average.add_(previous.narrow(0, piece.at, piece.numel));
    }
  }

  void put(
      at::Tensor& grad, const BucketStorage& /*storage*/, size_t slot,
      const at::Tensor& /*reduced*/, ScaledCopies& /*copies*/) override {
    shard_.arrived[slot] = 1;
    grad.reset();
  }

 private:
  GradientShard& shard_;
};

}  // namespace

std::unique_ptr<GradientPlacement> make_sharded_gradients(GradientShard& shard) {
  return std::make_unique<ShardedGradients>(shard);
}

std::unique_ptr<BucketReduction> make_reduce_scatter(
    ProcessGroup group, c10::Device device, std::shared_ptr<GradientShards> shards,
    size_t buffers) {
  return std::make_unique<ReduceScatter>(std::move(group), device, std::move(shards), buffers);
}

}  // namespace ddp
