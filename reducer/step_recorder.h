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

#include "pass_observer.h"
#include "times.h"

namespace ddp {

/// Takes the times of sampled steps. In steps that are not, a call is one look at a pointer, but
/// for those at the beginning and the end.
///
/// Threads: those that run a reducer; and whichever one completes a collective.
class StepRecorder final : public PassObserver {
 public:
  /// \param every  sample the first ten steps and then of every so many; 0: none.
  /// \param more  of the first ones that are sampled.
  StepRecorder(int rank, int64_t every, int64_t more = 0)
      : rank_(rank), every_(every), first_(kFirst + more) {}

  /// The step is the one from the last of these before a reduced backward.
  void begin_forward(int64_t step) override;
  /// The step that goes on is not sampled.
  void leave_out() { sample_.reset(); }
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
  /// The call that launched it came back: until then its thread had nothing else to do.
  void launched(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu) override {
    if (sample_) watch(bucket, in_flight, on_cpu);
  }
  void reduced(size_t bucket) override {
    if (sample_) note_done(*sample_, bucket);
  }
  void autograd_done() override;
  /// The step counts, unless this rank had no input in it.
  void end_pass(bool joined) override;

  /// Of the steps behind number `after`; 0 when none was sampled.
  double median_step_ms(int64_t after) const;

  std::vector<StepStats> steps() const { return {steps_.begin(), steps_.end()}; }

 private:
  static constexpr int64_t kFirst = 10;
  using Clock = std::chrono::steady_clock;

  /// Outlives the step in callbacks of collectives.
  struct Sample {
    Clock::time_point begin;
    std::mutex mutex;  // guards what is in `stats.buckets`
    StepStats stats;
    double held_up_ms = 0;  // of autograd's time, by calls that launch
    double now_ms() const { return milliseconds(Clock::now() - begin); }
  };

  static void note_done(Sample& sample, size_t bucket);
  void note_ready(size_t bucket);
  void note_launched(size_t bucket, int64_t bytes);
  void note_let_go(size_t bucket);
  void watch(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu);

  int rank_;
  int64_t every_;
  int64_t first_;
  std::shared_ptr<Sample> sample_;  // of the step that goes on, if it is sampled
  Clock::time_point last_end_{};
  std::deque<StepStats> steps_;
};

}  // namespace ddp
