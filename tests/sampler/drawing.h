// Helpers of the sampler tests for any of the samplers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/sharded_sampler.h>

#include "support/archives.h"
#include "support/error_of.h"

using ddp::testing::error_of;
using Indices = std::vector<size_t>;

/// Returns the indices that remain in the epoch.
inline Indices rest(ddp::ShardedSampler& sampler, size_t batch_size = 3) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) {
    all.insert(all.end(), batch->begin(), batch->end());
  }
  return all;
}

inline Indices epoch_of(ddp::ShardedSampler& sampler, size_t batch_size = 3) {
  sampler.reset();
  return rest(sampler, batch_size);
}

inline std::string saved(const ddp::ShardedSampler& sampler) {
  return ddp::testing::bytes_of_archive(sampler);
}

inline void load(ddp::ShardedSampler& sampler, const std::string& bytes) {
  auto archive = ddp::testing::archive_of(bytes);
  sampler.load(archive);
}
