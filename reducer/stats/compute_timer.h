#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include <c10/core/Device.h>

#include "pass/pass_observer.h"
#include "stats/step_recorder.h"
#include "stats/stragglers.h"

namespace ddp {

/// Takes the times of this rank's own work in each step, or on a device in each fourth, for the
/// status that the ranks exchange. No step waits for a device: its times come steps later.
///
/// A step begins when the step before has ended; passes inside no_sync() count as data.
///
/// Threads: as StepRecorder.
class ComputeTimer final : public PassObserver {
 public:
  /// \param device  as of StepRecorder.
  ComputeTimer(bool is_on, std::optional<c10::Device> device) : is_on_(is_on), device_(device) {}

  void begin_forward(int64_t number) override;
  void begin_backward() override;
  /// The times of these calls do not count: they may wait for other ranks.
  void launching(size_t /*b*/, int64_t /*bytes*/) override { begin_wait(); }
  void launched(
      size_t /*b*/, const BucketReduction::InFlight& /*in_flight*/, bool /*on_cpu*/) override {
    end_wait();
  }
  void begin_wait();
  void end_wait();
  void autograd_done() override;
  void end_pass(bool joined) override;
  /// Drops the current step, which is captured, or in which this rank has no input.
  void skip_step() { step_ = {}; }

  /// Takes the times of a step whose autograd is done; zeros where there is none.
  RankTimes take();

 private:
  struct Step {
    Moment before, begin, backward, computed;
    double waited_ms = 0;  // during autograd
  };

  bool is_timed(int64_t number) const { return is_on_ && (!device_ || number % 4 == 0); }

  bool is_on_;
  std::optional<c10::Device> device_;
  int64_t number_ = 0;     // of the current pass
  Moment last_end_;        // of the step before
  Moment wait_;            // a call that may wait for other ranks began
  Step step_;              // the current one; `begin` is unknown where it is not timed
  std::deque<Step> done_;  // that the device may not have ended
};

}  // namespace ddp
