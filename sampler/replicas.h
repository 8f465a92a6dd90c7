#pragma once

#include <cstdint>
#include <optional>

#include "shard.h"

namespace ddp {

/// Finds the ranks that share a dataset: a sampler's options give them, or else the default group
/// does.
///
/// \return a shard of that rank among them, with everything else at its default.
/// \throws c10::ValueError  num_replicas < 1, or a rank outside [0, num_replicas).
/// \throws c10::Error  one is unset while there is no default group.
ShardSpec shard_of_rank(
    const char* sampler, std::optional<int64_t> num_replicas, std::optional<int64_t> rank);

}  // namespace ddp
