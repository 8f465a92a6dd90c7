#include "stats/bucket_cap_choice.h"

#include <algorithm>

namespace ddp {

constexpr double kBytesPerMb = 1024.0 * 1024.0;
constexpr double kNearBest = 1.01;

void set_choice(BucketCapTuning& tuning, int64_t cap_bytes) {
  tuning.cap_mb = static_cast<double>(cap_bytes) / kBytesPerMb;
  tuning.predicted_ms = 0;
  for (const auto& candidate : tuning.candidates) {
    if (candidate.cap_mb == tuning.cap_mb) tuning.predicted_ms = candidate.predicted_ms;
  }
}

double predict_backward_ms(
    const BucketPlan& plan, const std::vector<ParameterExtent>& parameters, const StepTimes& times,
    const LinkCost& link) {
  double link_free_ms = 0;  // when the link is free for the next bucket
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    int64_t bytes = 0;
    double ready = b + 1 == plan.buckets.size() ? times.backward_ms : 0;
    for (const size_t index : plan.buckets[b]) {
      if (!parameters[index].expect_sparse) bytes += parameters[index].bytes;
      ready = std::max(ready, times.ready_ms[index]);
    }
    link_free_ms = std::max(link_free_ms, ready) + link.latency_ms +
                   static_cast<double>(bytes) * link.ms_per_byte;
  }
  return std::max(link_free_ms, times.backward_ms);
}

std::vector<int64_t> candidate_caps(int64_t bytes) {
  std::vector<int64_t> caps;
  for (int64_t decade = 1;; decade *= 10) {
    for (const double digit : {1.0, 2.0, decade == 1 ? 5.0 : 2.5, 5.0}) {
      const auto cap = static_cast<int64_t>(digit * static_cast<double>(decade) * kBytesPerMb);
      if (!caps.empty() && cap <= caps.back()) continue;
      caps.push_back(cap);
      if (cap >= bytes) return caps;
    }
  }
}

BucketCapTuning choose_bucket_cap(
    const std::vector<ParameterExtent>& parameters,
    const std::function<BucketPlan(int64_t cap)>& plan_for, const StepTimes& times,
    const LinkCost& link) {
  int64_t bytes = 0;
  for (const auto& p : parameters) bytes += p.expect_sparse ? 0 : p.bytes;
  BucketCapTuning tuning;
  tuning.latency_ms = link.latency_ms;
  tuning.ms_per_mb = link.ms_per_byte * kBytesPerMb;
  double best = 0;
  for (const int64_t cap : candidate_caps(bytes)) {
    const double predicted =
        times.rest_ms + predict_backward_ms(plan_for(cap), parameters, times, link);
    tuning.candidates.push_back({static_cast<double>(cap) / kBytesPerMb, predicted});
    if (tuning.candidates.size() == 1 || predicted < best) best = predicted;
  }
  for (const auto& candidate : tuning.candidates) {
    if (candidate.predicted_ms > best * kNearBest) continue;
    tuning.cap_mb = candidate.cap_mb;
    tuning.predicted_ms = candidate.predicted_ms;
  }
  return tuning;
}

}  // namespace ddp
