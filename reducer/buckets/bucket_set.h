#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ddp/internal/bucket_plan.h>
#include <ddp/internal/gradient_memory.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/internal/reducer.h>
#include <ddp/process_group.h>

#include "buckets/bucket.h"

namespace ddp {

class BucketSet {
 public:
  /// \param as_views  gradients stay in the buckets' memory (gradient_as_bucket_view).
  /// \param lazy  buckets have memory only from their launch to release().
  /// \param tail  elements after the gradients of the last bucket, for the ranks' status.
  BucketSet(
      std::vector<NamedParameter> parameters, ProcessGroup group, bool as_views, bool lazy,
      int64_t tail);

  /// Makes the buckets of `plan`. Gradients that are views into older ones move into the new ones.
  void build(std::vector<std::vector<size_t>> plan);

  /// From now on each rank gets only its parts of the averages, in the buckets of `plan`, which
  /// share `buffers` pieces of memory in turns. No gradient is sparse.
  void shard(
      std::vector<std::vector<size_t>> plan, std::shared_ptr<GradientShards> shards,
      size_t buffers);

  /// From now on every dense gradient is packed, without gaps: a communication hook needs it in the
  /// bucket.
  void pack_all();

  /// Whether buckets have memory only while they are under way.
  bool is_lazy() const { return lazy_ && !shards_; }
  /// Called at the end of a pass: frees the memory of lazy buckets, except what gradients live in.
  void release();

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  bool on_cpu() const { return parameters_.front().tensor.is_cpu(); }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t b) { return buckets_[b]; }
  const Bucket& operator[](size_t b) const { return buckets_[b]; }
  const Bucket& last() const { return buckets_.back(); }
  /// Parameter indices per bucket, in launch order.
  std::vector<std::vector<size_t>> indices() const;
  /// Bytes of all dense gradients.
  int64_t gradient_bytes() const;
  bool spans_devices() const { return spans_devices_; }
  int64_t storage_bytes() const;
  /// Called when this thread's backward pass begins: autograd allocates large gradients in memory
  /// that can be sent in place, until the returned object is destroyed.
  std::shared_ptr<void> use_gradient_memory() const;

 private:
  std::unique_ptr<GradientPlacement> make_placement(size_t b) const;
  BucketStorage::Allocate make_allocator(const std::vector<std::vector<size_t>>& plan) const;
  int64_t tail_of(const std::vector<size_t>& bucket, bool is_last) const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const bool as_views_;
  const bool lazy_;
  const int64_t tail_;
  bool leaves_gaps_;  // so that a kernel copies gradients 16 bytes at a time
  bool spans_devices_ = false;
  std::shared_ptr<GradientShards> shards_;  // null: every rank gets all averages
  size_t buffers_ = 1;                      // of sharded buckets
  std::shared_ptr<GradientMemory> memory_;  // of gradients that are not packed; null: all are
  std::vector<Bucket> buckets_;             // in launch order
  std::vector<size_t> direct_sizes_;        // ascending, each once
};

}  // namespace ddp
