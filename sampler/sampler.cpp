#include <ddp/sampler.h>

#include <memory>

#include <ddp/internal/check.h>

#include "shard_cursor.h"

namespace ddp {
namespace {

template <typename SamplerOptions>
std::shared_ptr<ShardCursor> permuted_cursor(
    const char* name, size_t dataset_size, const SamplerOptions& options, Tail tail) {
  auto cursor = cursor_options(name, options);
  cursor.order = permuted_order(static_cast<int64_t>(dataset_size), options.shuffle());
  cursor.shard.tail = tail;
  return std::make_shared<ShardCursor>(cursor);
}

DistributedEvalSamplerOptions for_evaluation(const DistributedSamplerOptions& options) {
  DDP_CHECK_VALUE(
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
    : ShardedSampler(permuted_cursor(
          "DistributedSampler", dataset_size, options,
          options.drop_last() ? Tail::kDrop : Tail::kRepeat)) {}

DistributedEvalSampler::DistributedEvalSampler(
    size_t dataset_size, const DistributedEvalSamplerOptions& options)
    : ShardedSampler(
          permuted_cursor("DistributedEvalSampler", dataset_size, options, Tail::kUneven)) {}

DistributedEvalSampler::DistributedEvalSampler(
    size_t dataset_size, const DistributedSamplerOptions& options)
    : DistributedEvalSampler(dataset_size, for_evaluation(options)) {}

}  // namespace ddp
