#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ddp/reduction_stats.h>

#include "bucket_plan.h"

namespace ddp {

/// What an all-reduce takes: latency_ms + bytes * ms_per_byte.
struct LinkCost {
  double latency_ms = 0;
  double ms_per_byte = 0;
};

/// What a step takes that no bucket cap changes.
struct StepTimes {
  std::vector<double> ready_ms;  // by parameter: since backward began, when its gradient was there
  double backward_ms = 0;        // of autograd's work, and of the copies into buckets
  double rest_ms = 0;            // from the end of one backward pass to the beginning of the next
};

/// When the last bucket of `plan` would be reduced, in ms since backward began.
///
/// A bucket leaves when its last gradient is there and the one before it has come back; the last
/// one, which carries the rank's status, not before autograd is done. The processor time that
/// sending takes from autograd is not seen. A sparse parameter counts as nothing.
double predict_backward_ms(
    const BucketPlan& plan, const std::vector<ParameterExtent>& parameters, const StepTimes& times,
    const LinkCost& link);

/// Caps worth trying for so many bytes: 1, 2, 5, 10, 25, 50, 100, ... MiB, up to the first that
/// holds everything.
std::vector<int64_t> candidate_caps(int64_t bytes);

/// Predicts the step with each candidate cap, and chooses the largest of those within 1% of the
/// best: fewer messages leave less to what the model does not see.
///
/// \param plan_for  the plan under a cap in bytes.
BucketCapTuning choose_bucket_cap(
    const std::vector<ParameterExtent>& parameters,
    const std::function<BucketPlan(int64_t cap)>& plan_for, const StepTimes& times,
    const LinkCost& link);

/// Takes a choice over, another rank's say.
void choose(BucketCapTuning& tuning, int64_t cap_bytes);

}  // namespace ddp
