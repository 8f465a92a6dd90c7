#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/process_group.h>

#include "gradients/gradient_placement.h"
#include "reduction/bucket_reduction.h"

namespace ddp {

/// Gradients that are released once they are packed: the reduction returns only the average of this
/// rank's part of the bucket.
class ShardedGradients final : public GradientPlacement {
 public:
  /// \param shard  of this rank; it outlives this.
  explicit ShardedGradients(GradientShard& shard) : shard_(shard) {}

  void after_pack(at::Tensor& grad, const BucketStorage& storage, size_t slot) override;
  void receive(const BucketStorage& storage, const at::Tensor& reduced) override;
  void put(
      at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced,
      ScaledCopies& copies) override;

 private:
  GradientShard& shard_;
};

/// Reduce-scatters each bucket.
///
/// \param device  of the parameters.
/// \param buffers  that the buckets share.
std::unique_ptr<BucketReduction> make_reduce_scatter(
    ProcessGroup group, c10::Device device, std::shared_ptr<GradientShards> shards, size_t buffers);

}  // namespace ddp
