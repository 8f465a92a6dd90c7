#include <ddp/internal/bucket_plan.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/reducer.h>

namespace ddp {
namespace {

struct OpenBucket {
  std::vector<size_t> indices;
  int64_t bytes = 0;
  size_t cap_index = 0;  // advances each time this dtype and device closes a bucket
};

using BucketKey = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;

std::vector<size_t> registration_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

void sort_by_smallest_index(BucketPlan& plan) {
  std::vector<size_t> by_index = registration_order(plan.buckets.size());
  const auto smallest = [&](size_t bucket) {
    return *std::min_element(plan.buckets[bucket].begin(), plan.buckets[bucket].end());
  };
  std::sort(by_index.begin(), by_index.end(), [&](size_t a, size_t b) {
    return smallest(a) < smallest(b);
  });
  BucketPlan sorted;
  for (const size_t bucket : by_index) {
    sorted.buckets.push_back(std::move(plan.buckets[bucket]));
    sorted.limits.push_back(plan.limits[bucket]);
  }
  plan = std::move(sorted);
}

int64_t bytes_of_cap(double mb, const char* option) {
  const double bytes = mb * 1024 * 1024;
  DDP_CHECK_VALUE(
      std::isfinite(bytes) && bytes >= 1, "DistributedDataParallelOptions: expected ", option,
      " to be a positive number of MiB (2^20 bytes), got ", mb,
      ". Typical values are 1 to 100; leave it unset for 1 MiB, then 25 MiB.");
  return bytes_of_mb(mb);
}

}  // namespace

int64_t bytes_of_mb(double mb) {
  const double bytes = mb * 1024 * 1024;
  return bytes < static_cast<double>(kUnlimitedBytes) ? static_cast<int64_t>(bytes)
                                                      : kUnlimitedBytes;
}

BucketPlan plan_buckets(
    const std::vector<ParameterExtent>& parameters, const std::vector<int64_t>& caps,
    const std::vector<size_t>& order) {
  DDP_CHECK_VALUE(!caps.empty(), "plan_buckets: expected at least one cap, got none");
  for (const int64_t cap : caps) {
    DDP_CHECK_VALUE(cap > 0, "plan_buckets: expected caps > 0 bytes, got ", cap);
  }
  DDP_CHECK_VALUE(
      order.empty() || order.size() == parameters.size(), "plan_buckets: expected an order of ",
      parameters.size(), " parameters, got ", order.size());

  BucketPlan plan;
  std::map<BucketKey, OpenBucket> open;
  const auto close = [&](std::vector<size_t> indices, int64_t limit) {
    plan.buckets.push_back(std::move(indices));
    plan.limits.push_back(limit);
  };
  const auto cap_of = [&](const OpenBucket& bucket) {
    return caps[std::min(bucket.cap_index, caps.size() - 1)];
  };

  const auto walk = order.empty() ? registration_order(parameters.size()) : order;
  std::vector<size_t> place(parameters.size());
  for (size_t at = 0; at < walk.size(); ++at) {
    const size_t index = walk[at];
    DDP_CHECK_VALUE(
        index < parameters.size(), "plan_buckets: expected indices below ", parameters.size(),
        " in the order, got ", index);
    place[index] = at;
    const auto& parameter = parameters[index];
    if (parameter.expect_sparse) {
      close({index}, 0);
      continue;
    }
    auto& bucket = open[{parameter.dtype, parameter.device.type(), parameter.device.index()}];
    bucket.indices.push_back(index);
    bucket.bytes += parameter.bytes;
    if (bucket.bytes >= cap_of(bucket)) {
      close(std::exchange(bucket.indices, {}), cap_of(bucket));
      bucket.bytes = 0;
      ++bucket.cap_index;
    }
  }

  std::vector<OpenBucket*> leftovers;
  for (auto& [key, bucket] : open) {
    if (!bucket.indices.empty()) leftovers.push_back(&bucket);
  }
  std::sort(leftovers.begin(), leftovers.end(), [&](const OpenBucket* a, const OpenBucket* b) {
    return place[a->indices.front()] < place[b->indices.front()];
  });
  for (auto* bucket : leftovers) close(std::move(bucket->indices), cap_of(*bucket));

  if (order.empty()) sort_by_smallest_index(plan);
  return plan;
}

std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters) {
  std::vector<ParameterExtent> extents;
  for (const auto& p : parameters) {
    extents.push_back(
        {static_cast<int64_t>(p.tensor.nbytes()), p.tensor.scalar_type(), p.tensor.device(),
         p.expect_sparse});
  }
  return extents;
}

std::vector<int64_t> bucket_caps_bytes(
    const std::optional<double>& cap_mb, const std::vector<double>& cap_mb_list) {
  if (!cap_mb_list.empty()) {
    std::vector<int64_t> caps;
    for (const double mb : cap_mb_list) caps.push_back(bytes_of_cap(mb, "bucket_cap_mb_list"));
    return caps;
  }
  if (cap_mb) return {bytes_of_cap(*cap_mb, "bucket_cap_mb")};
  return {kDefaultFirstBucketBytes, kDefaultBucketCapBytes};
}

}  // namespace ddp
