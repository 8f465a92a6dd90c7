#include <ddp/length_grouped_sampler.h>

#include <memory>
#include <utility>

#include <ddp/internal/check.h>

#include "shard_cursor.h"

namespace ddp {
namespace {

constexpr char kGroupedName[] = "DistributedLengthGroupedSampler";

std::shared_ptr<ShardCursor> cursor_for(
    std::vector<int64_t> lengths, const DistributedLengthGroupedSamplerOptions& options) {
  DDP_CHECK_VALUE(
      options.batch_size() >= 1 && options.batch_size() <= INT32_MAX, kGroupedName,
      ": expected batch_size >= 1 and below 2^31, got ", options.batch_size(),
      ". Pass the data loader's batch size.");
  DDP_CHECK_VALUE(
      options.batches_per_bucket() >= 1, kGroupedName, ": expected batches_per_bucket >= 1, got ",
      options.batches_per_bucket(), ". Pass how many batches to sort at a time, such as 50.");

  auto cursor = cursor_options(kGroupedName, options);
  cursor.order =
      length_grouped_order(std::move(lengths), options.batches_per_bucket(), options.shuffle());
  cursor.shard.tail = options.drop_last() ? Tail::kDrop : Tail::kRepeat;
  cursor.shard.batch_size = options.batch_size();
  return std::make_shared<ShardCursor>(cursor);
}

}  // namespace

DistributedLengthGroupedSampler::DistributedLengthGroupedSampler(
    std::vector<int64_t> lengths, const DistributedLengthGroupedSamplerOptions& options)
    : ShardedSampler(cursor_for(std::move(lengths), options)),
      batch_size_(static_cast<size_t>(options.batch_size())) {}

std::optional<std::vector<size_t>> DistributedLengthGroupedSampler::next(size_t batch_size) {
  DDP_CHECK_VALUE(
      batch_size == batch_size_, kGroupedName, "::next: expected the batch size ", batch_size_,
      " that the sampler groups for, got ", batch_size,
      ". Pass the same to the data loader and to the sampler.");
  return ShardedSampler::next(batch_size);
}

}  // namespace ddp
