#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <ddp/reduction_stats.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pass/pass_observer.h"

namespace ddp {

/// A moment of a step: a time of the host, or on a device an event in a stream, for which the host
/// does not wait.
class Moment {
 public:
  /// An unknown one.
  Moment() = default;
  /// The present: on a device that of its current stream.
  explicit Moment(const std::optional<c10::Device>& device);

  bool is_known() const { return event_ || time_ != Clock::time_point{}; }
  /// Whether the device has come to it.
  bool is_over() const { return !event_ || event_->query(); }
  /// \pre  both are over. -1 where this one is unknown.
  double ms_since(const Moment& earlier) const;

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point time_{};
  std::shared_ptr<c10::Event> event_;
};

/// Takes the times of sampled steps. In other steps a call only tests a pointer, except at the
/// beginning and the end.
///
/// On a device the times are those of events: neither a step nor steps() waits for one. steps()
/// then leaves out those that the device has not ended yet.
///
/// Threads: those that run a reducer, and any thread that completes a collective.
class StepRecorder final : public PassObserver {
 public:
  /// \param every  sample the first ten steps, and then every step whose number is a multiple of
  ///        this; 0: none.
  /// \param more  further first steps to sample.
  /// \param device  whose collectives make a stream wait; none: the host takes the times.
  /// \param inter_host_ms  the time between hosts until now; unset: unknown. Null: always.
  /// \param utilization  how busy the device is, in percent, for the sampled steps after the first
  ///        ones; unset: unknown. Null: always.
  StepRecorder(
      int rank, int64_t every, int64_t more = 0, std::optional<c10::Device> device = {},
      std::function<std::optional<double>()> inter_host_ms = nullptr,
      std::function<std::optional<int>()> utilization = nullptr)
      : rank_(rank),
        every_(every),
        first_(kFirst + more),
        device_(device),
        inter_host_ms_(std::move(inter_host_ms)),
        utilization_(std::move(utilization)) {}

  /// The step begins with the last forward before a reduced backward.
  void begin_forward(int64_t step) override;
  /// Drops the sample of the current step, which is captured.
  void skip_step() {
    sample_.reset();
    skips_ = true;
  }
  /// Whether the host has to wait for the collectives of this step to know their times.
  bool makes_host_wait() const { return sample_ != nullptr && !device_; }
  void armed(size_t buckets) override;
  void begin_backward() override {
    if (sample_) sample_->backward = Moment(device_);
  }
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
    if (sample_) note_done(*sample_, bucket, device_);
  }
  void autograd_done() override {
    if (sample_) sample_->computed = Moment(device_);
  }
  /// Stores the step, unless this rank had no input in it.
  void end_pass(bool joined) override;

  /// Median time of the sampled steps after number `after`; 0 when there is none.
  double median_step_ms(int64_t after) const;

  std::vector<StepStats> steps() const;

 private:
  static constexpr int64_t kFirst = 10;

  struct BucketMoments {
    int64_t bytes = 0;
    Moment ready, launched, done;
  };

  /// The times of one step. Callbacks of collectives may keep it after the step.
  struct Sample {
    StepStats stats;  // without times and buckets
    Moment before;    // the end of the step before
    Moment begin, backward, computed, end;
    double optimizer_ms = 0;              // since the end of the step before
    std::optional<double> inter_host_ms;  // in the step; until its end, by its begin
    std::mutex mutex;                     // guards the members below
    std::vector<BucketMoments> buckets;
    double blocked_ms = 0;  // time during autograd that its threads spent in calls that launch
  };

  bool is_sampled(int64_t step) const {
    return every_ > 0 && (step <= first_ || step % every_ == 0);
  }
  static bool is_over(Sample& sample);
  static StepStats stats_of(Sample& sample);
  void take_ended();
  static void note_done(Sample& sample, size_t bucket, const std::optional<c10::Device>& device);
  void note_done_beside(size_t bucket, c10d::Work& work);
  void note_ready(size_t bucket);
  void note_launched(size_t bucket, int64_t bytes);
  void note_call_returned(size_t bucket);
  void watch(size_t bucket, const BucketReduction::InFlight& in_flight, bool on_cpu);

  int rank_;
  int64_t every_;
  int64_t first_;
  std::shared_ptr<Sample> sample_;  // of the current step; null if it is not sampled
  std::optional<c10::Device> device_;
  int64_t step_ = 0;
  bool skips_ = false;       // the current step is captured
  Moment last_end_;          // of a step before one that is sampled
  double optimizer_ms_ = 0;  // OptimizerTime::total_ms() at that end
  std::function<std::optional<double>()> inter_host_ms_;
  std::function<std::optional<int>()> utilization_;
  std::deque<std::shared_ptr<Sample>> ending_;  // that the device may not have ended
  std::deque<StepStats> steps_;
};

}  // namespace ddp
