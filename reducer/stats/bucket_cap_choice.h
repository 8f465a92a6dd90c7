#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ddp/reduction_stats.h>

#include <ddp/internal/bucket_plan.h>

namespace ddp {

/// The time of an all-reduce: latency_ms + bytes * ms_per_byte.
struct LinkCost {
  double latency_ms = 0;
  double ms_per_byte = 0;
};

/// The times of a step that no bucket cap changes.
struct StepTimes {
  std::vector<double> ready_ms;  // by parameter: from the begin of backward until its gradient
  double backward_ms = 0;        // of autograd's work, and of the copies into buckets
  double rest_ms = 0;            // from the end of one backward pass to the beginning of the next
};

/// Predicts when the last bucket of `plan` is reduced, in ms since backward began.
///
/// A bucket is sent when its last gradient is ready and the bucket before it is reduced; the last
/// one, which carries the rank's status, not before autograd is done. The model ignores the
/// processor time that sending takes from autograd. A sparse parameter counts as no bytes.
double predict_backward_ms(
    const BucketPlan& plan, const std::vector<ParameterExtent>& parameters, const StepTimes& times,
    const LinkCost& link);

/// Caps worth trying for so many bytes: 1, 2, 5, 10, 25, 50, 100, ... MiB, up to the first that
/// holds everything.
std::vector<int64_t> candidate_caps(int64_t bytes);

/// Predicts the step time of each candidate cap, and chooses the largest cap within 1% of the best:
/// with fewer messages, costs that the model ignores matter less.
///
/// \param plan_for  the plan under a cap in bytes.
BucketCapTuning choose_bucket_cap(
    const std::vector<ParameterExtent>& parameters,
    const std::function<BucketPlan(int64_t cap)>& plan_for, const StepTimes& times,
    const LinkCost& link);

/// Sets the chosen cap, such as another rank's.
void set_choice(BucketCapTuning& tuning, int64_t cap_bytes);

}  // namespace ddp
