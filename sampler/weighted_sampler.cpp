#include <ddp/weighted_sampler.h>

#include <cmath>
#include <cstddef>
#include <memory>

#include <ATen/ops/tensor.h>
#include <ddp/internal/check.h>

#include "shard_cursor.h"

namespace ddp {
namespace {

constexpr char kWeightedName[] = "DistributedWeightedSampler";
// at::multinomial's limit.
constexpr size_t kMostWeights = size_t{1} << 24;

/// \return how many weights are above 0.
int64_t check_weights(const std::vector<double>& weights) {
  DDP_CHECK_VALUE(
      !weights.empty() && weights.size() <= kMostWeights, kWeightedName,
      ": expected 1 to 2^24 weights, one for each sample, got ", weights.size(), ".");
  int64_t drawable = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    DDP_CHECK_VALUE(
        std::isfinite(weights[i]) && weights[i] >= 0, kWeightedName,
        ": expected weights that are finite and >= 0, got ", weights[i], " for sample ", i, ".");
    if (weights[i] > 0) ++drawable;
  }
  DDP_CHECK_VALUE(
      drawable > 0, kWeightedName, ": expected a weight above 0, got ", weights.size(),
      " that are 0. Give a positive weight to each sample that may be drawn.");
  return drawable;
}

std::shared_ptr<ShardCursor> cursor_for(
    const std::vector<double>& weights, const DistributedWeightedSamplerOptions& options) {
  const int64_t drawable = check_weights(weights);
  const int64_t num_samples = options.num_samples().value_or(static_cast<int64_t>(weights.size()));
  DDP_CHECK_VALUE(
      num_samples >= 1, kWeightedName, ": expected num_samples >= 1, got ", num_samples,
      ". Pass the number of draws in an epoch, over all ranks.");
  DDP_CHECK_VALUE(
      options.replacement() || num_samples <= drawable, kWeightedName,
      ": expected num_samples of at most ", drawable,
      ", the number of weights above 0, because replacement is off; got ", num_samples,
      ". Set num_samples() or replacement(true).");

  auto cursor = cursor_options(kWeightedName, options);
  cursor.order = weighted_order(at::tensor(weights), num_samples, options.replacement());
  cursor.shard.tail = options.drop_last() ? Tail::kDrop : Tail::kRepeat;
  return std::make_shared<ShardCursor>(cursor);
}

}  // namespace

DistributedWeightedSampler::DistributedWeightedSampler(
    const std::vector<double>& weights, const DistributedWeightedSamplerOptions& options)
    : ShardedSampler(cursor_for(weights, options)) {}

}  // namespace ddp
