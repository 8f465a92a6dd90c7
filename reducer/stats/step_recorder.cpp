#include "stats/step_recorder.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace ddp {
namespace {

constexpr size_t kKeptSteps = 128;

// The time that at least one interval covers, from `after` on. Buckets launch in order, so the
// intervals come sorted by their beginnings.
double covered_ms(const std::vector<BucketStats>& buckets, double after) {
  double covered = 0;
  double until = after;
  for (const auto& bucket : buckets) {
    if (bucket.launched_ms < 0) continue;
    const double begin = std::max(bucket.launched_ms, until);
    covered += std::max(bucket.done_ms - begin, 0.0);
    until = std::max(until, bucket.done_ms);
  }
  return covered;
}

}  // namespace

void StepRecorder::begin_forward(int64_t step) {
  sample_.reset();
  step_ = step;
  skips_ = false;
  if (!is_sampled(step)) return;
  sample_ = std::make_shared<Sample>();
  if (device_) sample_->events = std::make_unique<EventTimes>(*device_, last_end_on_device_);
  sample_->begin = Clock::now();
  sample_->stats.rank = rank_;
  sample_->stats.step = step;
  sample_->stats.begin_us =
      std::chrono::duration<double, std::micro>(sample_->begin.time_since_epoch()).count();
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  sample_->stats.begin_unix_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(since_1970).count();
}

void StepRecorder::begin_backward() {
  if (!sample_) return;
  if (sample_->events) return sample_->events->backward();
  sample_->stats.forward_ms = sample_->now_ms();
}

void StepRecorder::note_ready(size_t bucket) {
  if (sample_->events) return sample_->events->ready(bucket);
  const std::lock_guard lock(sample_->mutex);
  auto& buckets = sample_->stats.buckets;
  // Another thread may have launched it in between.
  if (bucket >= buckets.size() || buckets[bucket].launched_ms >= 0) return;
  buckets[bucket].ready_ms = sample_->now_ms();
}

void StepRecorder::note_launched(size_t bucket, int64_t bytes) {
  const std::lock_guard lock(sample_->mutex);
  auto& stats = sample_->stats;
  if (bucket >= stats.buckets.size()) return;
  auto& launched = stats.buckets[bucket];
  launched.bytes = bytes;
  stats.bytes += bytes;
  if (sample_->events) return sample_->events->launched(bucket);
  launched.launched_ms = sample_->now_ms();
  if (launched.ready_ms < 0) launched.ready_ms = launched.launched_ms;  // no gradient to wait for
}

void StepRecorder::note_call_returned(size_t bucket) {
  const std::lock_guard lock(sample_->mutex);
  const auto& stats = sample_->stats;
  if (bucket >= stats.buckets.size() || stats.compute_ms > 0) return;
  const auto& launched = stats.buckets[bucket];
  const double end = launched.done_ms < 0 ? sample_->now_ms() : launched.done_ms;
  sample_->blocked_ms += end - launched.launched_ms;
}

void StepRecorder::note_done(Sample& sample, size_t bucket) {
  const double now = sample.now_ms();
  const std::lock_guard lock(sample.mutex);
  auto& buckets = sample.stats.buckets;
  if (bucket < buckets.size() && buckets[bucket].done_ms < 0) buckets[bucket].done_ms = now;
}

// Records the end of the bucket's collective from its own callback, where the backend has one that
// is called at the end.
void StepRecorder::watch(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu) {
  if (sample_->events) {
    if (in_flight.work) sample_->events->done(bucket, *in_flight.work);
    return;
  }
  if (!in_flight.work && !in_flight.future) return note_done(*sample_, bucket);  // a group of one
  if (!on_cpu) return;  // NCCL's work is complete when it is queued
  try {
    const auto future = in_flight.future ? in_flight.future : in_flight.work->getFuture();
    future->addCallback(
        [sample = sample_, bucket](c10::ivalue::Future&) { note_done(*sample, bucket); });
  } catch (const c10::Error&) {
    // A backend without futures: reduced() records the end.
  }
  note_call_returned(bucket);
}

double StepRecorder::median_step_ms(int64_t after) const {
  std::vector<double> times;
  for (const auto& step : steps_) {
    if (step.step > after) times.push_back(step.step_ms);
  }
  return median(std::move(times));
}

void StepRecorder::autograd_done() {
  if (!sample_) return;
  if (sample_->events) return sample_->events->computed();
  sample_->stats.compute_ms = sample_->now_ms();
}

void StepRecorder::end_pass(bool joined) {
  if (joined) sample_.reset();
  if (joined || skips_ || every_ == 0) return;
  const auto now = Clock::now();
  const auto before = std::exchange(last_end_, now);
  const auto sample = std::exchange(sample_, nullptr);
  last_end_on_device_.reset();
  if (device_ && (sample || is_sampled(step_ + 1))) {
    last_end_on_device_ = moment_on(*device_);
  }
  if (!sample) return;
  if (sample->events) {
    sample->events->end(last_end_on_device_);
  } else {
    sample->stats.total_ms = sample->now_ms();
    if (before != Clock::time_point{}) sample->stats.step_ms = milliseconds(now - before);
  }
  ending_.push_back(sample);
  take_ended();
}

void StepRecorder::take_ended() {
  while (!ending_.empty()) {
    auto& sample = *ending_.front();
    if (sample.events && !sample.events->are_over() && ending_.size() <= kKeptSteps) return;
    if (!sample.events || sample.events->are_over()) steps_.push_back(stats_of(sample));
    ending_.pop_front();
    if (steps_.size() > kKeptSteps) steps_.pop_front();
  }
}

StepStats StepRecorder::stats_of(Sample& sample) {
  const std::lock_guard lock(sample.mutex);
  auto stats = sample.stats;
  if (sample.events) sample.events->write(stats);
  stats.communication_ms = covered_ms(stats.buckets, 0);
  stats.exposed_ms = sample.blocked_ms + covered_ms(stats.buckets, stats.compute_ms);
  return stats;
}

std::vector<StepStats> StepRecorder::steps() const {
  std::vector<StepStats> steps(steps_.begin(), steps_.end());
  for (const auto& sample : ending_) {
    if (!sample->events->are_over()) break;
    steps.push_back(stats_of(*sample));
  }
  return steps;
}

}  // namespace ddp
