#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/process_group.h>

#include "bucket_reduction.h"
#include "gradient_placement.h"

namespace ddp {

/// Gradients that are gone once they are packed: the average of this rank's part of the bucket is
/// all that comes back.
class ShardedGradients final : public GradientPlacement {
 public:
  /// \param rank  whose part `shard` is; both outlive this.
  ShardedGradients(GradientShard& shard, int rank) : shard_(shard), rank_(rank) {}

  void packed(at::Tensor& grad, const BucketStorage& storage, size_t slot) override;
  void receive(const BucketStorage& storage, const at::Tensor& reduced) override;
  void put(at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced)
      override;

 private:
  GradientShard& shard_;
  const int rank_;
};

/// A reduce-scatter of each bucket. One at a time: the buckets share one piece of memory.
///
/// \param device  of the parameters.
std::unique_ptr<BucketReduction> make_reduce_scatter(
    ProcessGroup group, c10::Device device, std::shared_ptr<GradientShards> shards);

}  // namespace ddp
