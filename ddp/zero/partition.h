#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>
#include <torch/optim/optimizer.h>

namespace ddp {

// Which parameters of a ZeroRedundancyOptimizer lie beside each other in a chunk. A chunk is
// gathered in one call; FlatLayout::pieces() (shard/) cuts it into the parts of the ranks.

/// Parameters by chunk, each chunk in the order of its memory.
using Chunks = std::vector<std::vector<at::Tensor>>;

/// One chunk for each bucket of the reducer (stage 2).
///
/// \param buckets  indices into `parameters`.
Chunks chunks_of_buckets(
    const std::vector<std::vector<size_t>>& buckets, const std::vector<NamedParameter>& parameters);

/// Chunks of those of `parameters` that an optimizer with these groups steps (stage 1): of 2 MiB,
/// but of 25 MiB over a backend whose collectives only the stream waits for, which gathers without
/// a copy, and pays for each collective.
Chunks chunks_of_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<NamedParameter>& parameters, bool waits_on_stream);

}  // namespace ddp
