#include "stats/bucket_tuner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/tensor.h>

#include "stats/times.h"

namespace ddp {

double BucketTuner::since_begin_ms() const { return milliseconds(Clock::now() - begin_); }

void BucketTuner::begin_backward() {
  begin_ = Clock::now();
  now_.copy_ms = 0;
  if (last_end_ != Clock::time_point{}) now_.rest_ms = milliseconds(begin_ - last_end_);
}

void BucketTuner::communicated() {
  last_end_ = Clock::now();
  now_.communication_ms = since_begin_ms() - now_.backward_ms - now_.copy_ms;
  passes_.push_back(now_);
  // A parameter that is not used in the next pass counts as ready at its beginning.
  std::fill(now_.ready_ms.begin(), now_.ready_ms.end(), 0);
}

double BucketTuner::median_of(c10::function_ref<double(const Pass&)> value) const {
  std::vector<double> values;
  for (size_t i = kWarmUp; i < passes_.size(); ++i) values.push_back(value(passes_[i]));
  return median(std::move(values));
}

// The last rank to start a collective waits for no other one: its time, the minimum over the ranks,
// is the link's.
LinkCost BucketTuner::link_cost(
    int64_t bytes, size_t messages, c10::function_ref<void(c10d::Work&)> wait) const {
  // The same size on every rank; a rank whose input ended has measured fewer passes.
  std::vector<double> mine(kPasses - kWarmUp, std::numeric_limits<double>::infinity());
  for (size_t i = kWarmUp; i < std::min(passes_.size(), kPasses); ++i) {
    mine[i - kWarmUp] = passes_[i].communication_ms;
  }
  std::vector<at::Tensor> least{at::tensor(mine, at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  std::vector<double> latencies;
  for (size_t trial = 0; trial < kPasses; ++trial) {
    const auto begin = Clock::now();
    wait(*group_->allreduce(least, options));
    if (trial >= kWarmUp) latencies.push_back(milliseconds(Clock::now() - begin));
  }
  const auto* times = least[0].const_data_ptr<double>();
  LinkCost cost;
  cost.latency_ms = median(std::move(latencies));
  const double whole = median({times, times + least[0].numel()});
  cost.ms_per_byte = bytes > 0
                         ? std::max(whole - static_cast<double>(messages) * cost.latency_ms, 0.0) /
                               static_cast<double>(bytes)
                         : 0;
  return cost;
}

StepTimes BucketTuner::step_times() const {
  StepTimes times;
  const auto with_copies = [](const Pass& pass, double ms) {
    return pass.backward_ms > 0 ? ms * (pass.backward_ms + pass.copy_ms) / pass.backward_ms : ms;
  };
  for (size_t i = 0; i < now_.ready_ms.size(); ++i) {
    times.ready_ms.push_back(
        median_of([&](const Pass& pass) { return with_copies(pass, pass.ready_ms[i]); }));
  }
  times.backward_ms =
      median_of([&](const Pass& pass) { return with_copies(pass, pass.backward_ms); });
  times.rest_ms = median_of([](const Pass& pass) { return pass.rest_ms; });
  return times;
}

}  // namespace ddp
