#include "zero/partition.h"

#include <numeric>
#include <unordered_set>

#include <ddp/internal/bucket_plan.h>

namespace ddp {
namespace {

// A backend may need a copy of that size for a gather.
constexpr int64_t kChunkBytes = int64_t{2} << 20;
constexpr int64_t kStreamChunkBytes = int64_t{25} << 20;

}  // namespace

Chunks chunks_of_buckets(
    const std::vector<std::vector<size_t>>& buckets,
    const std::vector<NamedParameter>& parameters) {
  Chunks chunks;
  for (const auto& indices : buckets) {
    auto& chunk = chunks.emplace_back();
    for (const auto index : indices) chunk.push_back(parameters[index].tensor);
  }
  return chunks;
}

Chunks chunks_of_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<NamedParameter>& parameters, bool waits_on_stream) {
  std::unordered_set<const void*> stepped;
  for (const auto& group : groups) {
    for (const auto& p : group.params()) stepped.insert(p.unsafeGetTensorImpl());
  }
  std::vector<NamedParameter> own;
  for (const auto& p : parameters) {
    if (stepped.count(p.tensor.unsafeGetTensorImpl()) > 0) own.push_back(p);
  }
  std::vector<size_t> reversed(own.size());  // the usual order of gradients
  std::iota(reversed.rbegin(), reversed.rend(), size_t{0});
  const auto bytes = waits_on_stream ? kStreamChunkBytes : kChunkBytes;
  return chunks_of_buckets(plan_buckets(extents_of(own), {bytes}, reversed).buckets, own);
}

}  // namespace ddp
