#include "stats/compute_timer.h"

#include <algorithm>
#include <utility>

namespace ddp {

void ComputeTimer::begin_forward(int64_t number) {
  number_ = number;
  // The first of several forward passes in a step ends the wait for data.
  if (!is_timed(number) || step_.begin.is_known() || !last_end_.is_known()) return;
  step_.before = last_end_;
  step_.begin = Moment(device_);
}

void ComputeTimer::begin_backward() {
  if (step_.begin.is_known()) step_.backward = Moment(device_);
}

void ComputeTimer::begin_wait() {
  if (!device_ && step_.backward.is_known()) wait_ = Moment(device_);
}

void ComputeTimer::end_wait() {
  if (wait_.is_known()) step_.waited_ms += Moment(device_).ms_since(wait_);
  wait_ = {};
}

void ComputeTimer::autograd_done() {
  if (!step_.backward.is_known()) return;  // a rank that joined has no times
  step_.computed = Moment(device_);
  done_.push_back(std::exchange(step_, {}));
}

void ComputeTimer::end_pass(bool /*joined*/) {
  step_ = {};
  last_end_ = is_timed(number_ + 1) ? Moment(device_) : Moment();
}

RankTimes ComputeTimer::take() {
  constexpr size_t kMost = 4;  // steps that a host runs ahead; more are not worth their memory
  if (done_.size() > kMost) done_.pop_front();
  if (done_.empty()) return {};
  const auto& step = done_.front();
  for (const auto* moment : {&step.computed, &step.backward, &step.begin, &step.before}) {
    if (!moment->is_over()) return {};
  }
  RankTimes times;
  times.data = step.begin.ms_since(step.before);
  times.forward = step.backward.ms_since(step.begin);
  times.backward = std::max(step.computed.ms_since(step.backward) - step.waited_ms, 0.0);
  done_.pop_front();
  return times;
}

}  // namespace ddp
