#include <ddp/sampler.h>

#include <memory>

#include <c10/util/Exception.h>

#include "replicas.h"
#include "shard_cursor.h"

namespace ddp {
namespace {

std::shared_ptr<ShardCursor> cursor_for(
    size_t dataset_size, const DistributedSamplerOptions& options) {
  ShardCursor::Options cursor;
  cursor.name = "DistributedSampler";
  cursor.order = permuted_order(static_cast<int64_t>(dataset_size), options.shuffle());
  cursor.shard = shard_of_rank("DistributedSampler", options.num_replicas(), options.rank());
  cursor.shard.tail = options.drop_last() ? Tail::kDrop : Tail::kRepeat;
  cursor.seed = options.seed();
  cursor.advance_epoch = options.advance_epoch();
  return std::make_shared<ShardCursor>(cursor);
}

std::shared_ptr<ShardCursor> cursor_for(
    size_t dataset_size, const DistributedEvalSamplerOptions& options) {
  ShardCursor::Options cursor;
  cursor.name = "DistributedEvalSampler";
  cursor.order = permuted_order(static_cast<int64_t>(dataset_size), options.shuffle());
  cursor.shard = shard_of_rank("DistributedEvalSampler", options.num_replicas(), options.rank());
  cursor.shard.tail = Tail::kUneven;
  cursor.seed = options.seed();
  cursor.advance_epoch = options.advance_epoch();
  return std::make_shared<ShardCursor>(cursor);
}

DistributedEvalSamplerOptions for_evaluation(const DistributedSamplerOptions& options) {
  TORCH_CHECK_VALUE(
      !options.drop_last(),
      "DistributedEvalSampler: expected drop_last=false, for it gives every sample to a rank, got "
      "true. Leave it out, or use DistributedSampler.");
  return DistributedEvalSamplerOptions()
      .num_replicas(options.num_replicas())
      .rank(options.rank())
      .shuffle(options.shuffle())
      .seed(options.seed())
      .advance_epoch(options.advance_epoch());
}

}  // namespace

DistributedSampler::DistributedSampler(
    size_t dataset_size, const DistributedSamplerOptions& options)
    : ShardedSampler(cursor_for(dataset_size, options)) {}

DistributedEvalSampler::DistributedEvalSampler(
    size_t dataset_size, const DistributedEvalSamplerOptions& options)
    : ShardedSampler(cursor_for(dataset_size, options)) {}

DistributedEvalSampler::DistributedEvalSampler(
    size_t dataset_size, const DistributedSamplerOptions& options)
    : DistributedEvalSampler(dataset_size, for_evaluation(options)) {}

}  // namespace ddp
