#pragma once

#include <cstddef>
#include <functional>

#include <ddp/detail/item_hash.h>
#include <ddp/process_group.h>

#include "shard_cursor.h"

namespace ddp {

/// Implements ShardedSampler::check_dataset for a sampler with this cursor.
void check_dataset(
    const ShardCursor& cursor, const std::function<void(detail::ItemHash&)>& hash_first_items,
    size_t items, const ProcessGroup& group);

}  // namespace ddp
