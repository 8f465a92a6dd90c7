#include "stats/step_recorder.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/internal/side_stream.h>

#include "stats/times.h"

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

Moment::Moment(const std::optional<c10::Device>& device) {
  if (!device) {
    time_ = Clock::now();
    return;
  }
  // The default flag is the one with times.
  event_ = std::make_shared<c10::Event>(device->type(), c10::EventFlag::BACKEND_DEFAULT);
  event_->record(current_stream_of(*device));
}

double Moment::ms_since(const Moment& earlier) const {
  if (!is_known()) return -1;
  return event_ ? earlier.event_->elapsedTime(*event_) : milliseconds(time_ - earlier.time_);
}

void StepRecorder::begin_forward(int64_t step) {
  sample_.reset();
  step_ = step;
  skips_ = false;
  if (!is_sampled(step)) return;
  sample_ = std::make_shared<Sample>();
  sample_->before = last_end_;
  sample_->begin = Moment(device_);
  if (!device_) sample_->optimizer_ms = OptimizerTime::total_ms() - optimizer_ms_;
  if (inter_host_ms_) sample_->inter_host_ms = inter_host_ms_();
  auto& stats = sample_->stats;
  stats.rank = rank_;
  stats.step = step;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  stats.begin_us = std::chrono::duration<double, std::micro>(now).count();
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  stats.begin_unix_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since_1970).count();
}

void StepRecorder::armed(size_t buckets) {
  if (!sample_) return;
  const std::lock_guard lock(sample_->mutex);
  sample_->buckets.assign(buckets, {});
}

void StepRecorder::note_ready(size_t bucket) {
  const std::lock_guard lock(sample_->mutex);
  auto& buckets = sample_->buckets;
  // Another thread may have launched it in between.
  if (bucket >= buckets.size() || buckets[bucket].launched.is_known()) return;
  buckets[bucket].ready = Moment(device_);
}

void StepRecorder::note_launched(size_t bucket, int64_t bytes) {
  const std::lock_guard lock(sample_->mutex);
  if (bucket >= sample_->buckets.size()) return;
  auto& launched = sample_->buckets[bucket];
  launched.bytes = bytes;
  launched.launched = Moment(device_);
  if (!launched.ready.is_known()) launched.ready = launched.launched;  // no gradient to wait for
}

void StepRecorder::note_call_returned(size_t bucket) {
  const std::lock_guard lock(sample_->mutex);
  if (bucket >= sample_->buckets.size() || sample_->computed.is_known()) return;
  const auto& launched = sample_->buckets[bucket];
  const auto end = launched.done.is_known() ? launched.done : Moment(device_);
  // As stats_of() has the bucket's time, to the last bit: the call's is a part of it.
  sample_->blocked_ms += end.ms_since(sample_->begin) - launched.launched.ms_since(sample_->begin);
}

void StepRecorder::note_done(
    Sample& sample, size_t bucket, const std::optional<c10::Device>& device) {
  const std::lock_guard lock(sample.mutex);
  if (bucket >= sample.buckets.size()) return;
  auto& done = sample.buckets[bucket].done;
  if (!done.is_known()) done = Moment(device);
}

// Buckets end in the order in which they begin, so one side stream waits for all of them.
void StepRecorder::note_done_beside(size_t bucket, c10d::Work& work) {
  const c10::StreamGuard side(side_stream(*device_, SideStream::Times));
  work.synchronize();
  note_done(*sample_, bucket, device_);
}

// Records the end of the bucket's collective from its own callback, where the backend has one that
// is called at the end.
void StepRecorder::watch(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu) {
  if (device_) {
    if (in_flight.work) note_done_beside(bucket, *in_flight.work);
    return;
  }
  if (!in_flight.work && !in_flight.future) return note_done(*sample_, bucket, {});  // one rank
  if (!on_cpu) return;  // NCCL's work is complete when it is queued
  try {
    const auto future = in_flight.future ? in_flight.future : in_flight.work->getFuture();
    future->addCallback(
        [sample = sample_, bucket](c10::ivalue::Future&) { note_done(*sample, bucket, {}); });
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

void StepRecorder::end_pass(bool joined) {
  if (joined) sample_.reset();
  if (joined || skips_ || every_ == 0) return;
  const auto sample = std::exchange(sample_, nullptr);
  // An event costs more than a look at the clock.
  const bool needs_end = !device_ || sample || is_sampled(step_ + 1);
  last_end_ = needs_end ? Moment(device_) : Moment();
  optimizer_ms_ = OptimizerTime::total_ms();
  if (!sample) return;
  sample->end = last_end_;
  if (sample->inter_host_ms) *sample->inter_host_ms = *inter_host_ms_() - *sample->inter_host_ms;
  // The driver's last period has begun before the first steps.
  if (utilization_ && step_ > first_) sample->stats.device_utilization = utilization_();
  ending_.push_back(sample);
  take_ended();
}

void StepRecorder::take_ended() {
  while (!ending_.empty()) {
    auto& sample = *ending_.front();
    const bool over = is_over(sample);
    if (!over && ending_.size() <= kKeptSteps) return;
    if (over) steps_.push_back(stats_of(sample));
    ending_.pop_front();
    if (steps_.size() > kKeptSteps) steps_.pop_front();
  }
}

bool StepRecorder::is_over(Sample& sample) {
  for (const auto* moment :
       {&sample.end, &sample.computed, &sample.backward, &sample.begin, &sample.before}) {
    if (!moment->is_over()) return false;
  }
  const std::lock_guard lock(sample.mutex);
  return std::all_of(sample.buckets.begin(), sample.buckets.end(), [](const BucketMoments& bucket) {
    return bucket.done.is_over() && bucket.launched.is_over() && bucket.ready.is_over();
  });
}

StepStats StepRecorder::stats_of(Sample& sample) {
  const std::lock_guard lock(sample.mutex);
  auto stats = sample.stats;
  const auto since_begin = [&](const Moment& moment) { return moment.ms_since(sample.begin); };
  stats.forward_ms = since_begin(sample.backward);
  stats.compute_ms = since_begin(sample.computed);
  stats.total_ms = since_begin(sample.end);
  if (sample.before.is_known()) {
    stats.step_ms = sample.end.ms_since(sample.before);
    stats.data_ms = std::max(sample.begin.ms_since(sample.before) - sample.optimizer_ms, 0.0);
  }
  for (const auto& [bytes, ready, launched, done] : sample.buckets) {
    stats.bytes += bytes;
    stats.buckets.push_back({bytes, since_begin(ready), since_begin(launched), since_begin(done)});
  }
  stats.communication_ms = covered_ms(stats.buckets, 0);
  if (sample.inter_host_ms) {
    stats.inter_host_ms = std::min(*sample.inter_host_ms, stats.communication_ms);
    stats.intra_host_ms = stats.communication_ms - stats.inter_host_ms;
  }
  stats.exposed_ms = sample.blocked_ms + covered_ms(stats.buckets, stats.compute_ms);
  return stats;
}

std::vector<StepStats> StepRecorder::steps() const {
  std::vector<StepStats> steps(steps_.begin(), steps_.end());
  for (const auto& sample : ending_) {
    if (!is_over(*sample)) break;
    steps.push_back(stats_of(*sample));
  }
  return steps;
}

}  // namespace ddp
