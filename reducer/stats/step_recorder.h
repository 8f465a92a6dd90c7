#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/reduction_stats.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pass/pass_observer.h"
#include "stats/times.h"

namespace ddp {

/// Takes the times of sampled steps. In other steps a call only tests a pointer, except at the
/// beginning and the end.
///
/// Threads: those that run a reducer, and any thread that completes a collective.
class StepRecorder final : public PassObserver {
 public:
  /// \param every  sample the first ten steps, and then every step whose number is a multiple of
  ///        this; 0: none.
  /// \param more  further first steps to sample.
  StepRecorder(int rank, int64_t every, int64_t more = 0)
      : rank_(rank), every_(every), first_(kFirst + more) {}

  /// Of several forwards before a reduced backward, the step begins with the last one.
  void begin_forward(int64_t step) override;
  /// Drops the sample of the current step.
  void skip_step() { sample_.reset(); }
  bool is_sampling() const { return sample_ != nullptr; }
  void armed(size_t buckets) override {
    if (sample_) sample_->stats.buckets.assign(buckets, {});
  }
  void begin_backward() override;
  void bucket_ready(size_t bucket) override {
    if (sample_) note_ready(bucket);
  }
  void launching(size_t bucket, int64_t bytes) override {
    if (sample_) note_launched(bucket, bytes);
  }
  /// The call that launched the bucket returned: until then it blocked its thread.
  void launched(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu) override {
    if (sample_) watch(bucket, in_flight, on_cpu);
  }
  void reduced(size_t bucket) override {
    if (sample_) note_done(*sample_, bucket);
  }
  void autograd_done() override;
  /// Stores the step, unless this rank had no input in it.
  void end_pass(bool joined) override;

  /// Median time of the sampled steps after number `after`; 0 when there is none.
  double median_step_ms(int64_t after) const;

  std::vector<StepStats> steps() const { return {steps_.begin(), steps_.end()}; }

 private:
  static constexpr int64_t kFirst = 10;
  using Clock = std::chrono::steady_clock;

  /// The times of one step. Callbacks of collectives may keep it after the step.
  struct Sample {
    Clock::time_point begin;
    std::mutex mutex;  // guards the content of `stats.buckets`
    StepStats stats;
    double blocked_ms = 0;  // time during autograd that its threads spent in calls that launch
    double now_ms() const { return milliseconds(Clock::now() - begin); }
  };

  static void note_done(Sample& sample, size_t bucket);
  void note_ready(size_t bucket);
  void note_launched(size_t bucket, int64_t bytes);
  void note_call_returned(size_t bucket);
  void watch(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu);

  int rank_;
  int64_t every_;
  int64_t first_;
  std::shared_ptr<Sample> sample_;  // of the current step; null if it is not sampled
  Clock::time_point last_end_{};
  std::deque<StepStats> steps_;
};

}  // namespace ddp
