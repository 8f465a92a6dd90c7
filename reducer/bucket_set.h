#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ddp/internal/gradient_memory.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/internal/reducer.h>
#include <ddp/process_group.h>

#include "bucket.h"
#include "bucket_plan.h"

namespace ddp {

/// The buckets that all parameters' gradients travel in, and the memory of those.
class BucketSet {
 public:
  /// \param as_views  gradients stay in the buckets' memory (gradient_as_bucket_view).
  /// \param tail  elements behind the gradients of the last bucket, for the ranks' status.
  BucketSet(
      std::vector<NamedParameter> parameters, ProcessGroup group, bool as_views, int64_t tail);

  /// Makes the buckets of `plan`. Gradients that are views into older ones move into the new ones.
  void build(std::vector<std::vector<size_t>> plan);

  /// From now on each rank gets its parts of the averages alone, in the buckets of `plan`, which
  /// share one piece of memory. No gradient is sparse.
  void shard(std::vector<std::vector<size_t>> plan, std::shared_ptr<GradientShards> shards);

  /// From now on every dense gradient is packed, for other code to see it in its bucket.
  void pack_all();

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  bool on_cpu() const { return parameters_.front().tensor.is_cpu(); }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t b) { return buckets_[b]; }
  const Bucket& operator[](size_t b) const { return buckets_[b]; }
  const Bucket& last() const { return buckets_.back(); }
  /// Parameter indices per bucket, in launch order.
  std::vector<std::vector<size_t>> indices() const;
  /// Of all dense gradients.
  int64_t gradient_bytes() const;
  /// Of the buckets' memory.
  int64_t storage_bytes() const;
  /// This thread's backward pass begins: large gradients shall come about where they can be sent
  /// from, until what is returned goes.
  std::shared_ptr<void> serve_gradients() const;

 private:
  std::unique_ptr<GradientPlacement> make_placement(size_t b) const;
  BucketStorage::Allocate make_allocator(const std::vector<std::vector<size_t>>& plan) const;
  int64_t tail_of(const std::vector<size_t>& bucket, bool is_last) const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const bool as_views_;
  const int64_t tail_;
  std::shared_ptr<GradientShards> shards_;  // null: every rank gets all averages
  std::shared_ptr<GradientMemory> memory_;  // of gradients that travel alone; null: none does
  std::vector<Bucket> buckets_;             // in launch order
  std::vector<size_t> direct_sizes_;        // rising
};

/// What the planner has to know of each parameter.
std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters);

}  // namespace ddp
