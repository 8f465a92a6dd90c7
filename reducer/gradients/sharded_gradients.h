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
///
/// \param shard  of this rank; it outlives this.
std::unique_ptr<GradientPlacement> make_sharded_gradients(GradientShard& shard);

/// Reduce-scatters each bucket.
///
/// \param device  of the parameters.
/// \param buffers  that the buckets share.
std::unique_ptr<BucketReduction> make_reduce_scatter(
    ProcessGroup group, c10::Device device, std::shared_ptr<GradientShards> shards, size_t buffers);

}  // namespace ddp
