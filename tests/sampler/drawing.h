// Helpers of the sampler tests for any of the samplers.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/sharded_sampler.h>
#include <torch/serialize/archive.h>

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

inline std::stringstream saved(const ddp::ShardedSampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::stringstream file;
  archive.save_to(file);
  return file;
}

inline void load(ddp::ShardedSampler& sampler, std::stringstream file) {
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  sampler.load(archive);
}
