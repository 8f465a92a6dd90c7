#include <ddp/sharded_sampler.h>

#include <utility>

#include "dataset_check.h"
#include "rebind.h"
#include "shard_cursor.h"

namespace ddp {

ShardedSampler::ShardedSampler(std::shared_ptr<ShardCursor> cursor)
    : torch::data::samplers::DistributedSampler<>(
          static_cast<size_t>(cursor->options().order.size),
          static_cast<size_t>(cursor->options().shard.num_replicas),
          static_cast<size_t>(cursor->options().shard.rank),
          /*allow_duplicates=*/cursor->options().shard.tail == Tail::kRepeat),
      cursor_(std::move(cursor)) {}

void ShardedSampler::set_epoch(size_t epoch) { cursor_->set_epoch(static_cast<int64_t>(epoch)); }

size_t ShardedSampler::epoch() const { return static_cast<size_t>(cursor_->epoch()); }

void ShardedSampler::reset(std::optional<size_t> new_size) { cursor_->reset(new_size); }

std::optional<std::vector<size_t>> ShardedSampler::next(size_t batch_size) {
  return cursor_->next(batch_size);
}

std::optional<std::vector<size_t>> ShardedSampler::next_of(size_t global) {
  return cursor_->next_of(global);
}

void ShardedSampler::rebind(const GroupArg& group) { ddp::rebind(*cursor_, group.get()); }

std::function<void()> ShardedSampler::bookmark() const {
  return [cursor = cursor_, standing = cursor_->standing()] { cursor->go_to(standing); };
}

bool ShardedSampler::is_over() const { return cursor_->standing().over; }

void ShardedSampler::stop() {
  auto end = cursor_->standing();
  end.over = true;
  cursor_->go_to(end);
}

void ShardedSampler::consume(size_t samples) { cursor_->consume(samples); }

size_t ShardedSampler::size() const { return static_cast<size_t>(cursor_->size()); }

void ShardedSampler::save(torch::serialize::OutputArchive& archive) const {
  cursor_->save(archive);
}

void ShardedSampler::load(torch::serialize::InputArchive& archive) { cursor_->load(archive); }

void ShardedSampler::check_same_on_all_ranks(
    const std::function<void(detail::ItemHash&)>& hash_first_items, size_t items,
    const GroupArg& group) const {
  ddp::check_dataset(*cursor_, hash_first_items, items, group.get());
}

}  // namespace ddp
