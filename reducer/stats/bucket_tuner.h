#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>

#include "pass/pass_observer.h"
#include "stats/bucket_cap_choice.h"

namespace ddp {

/// Measures the times from which a bucket cap is chosen, in the first steps. During these steps all
/// gradients are reduced after backward, in one piece for each dtype: sending does not slow the
/// computation down, and the time of the reduction is the cost of the link.
///
/// Threads: ready() on autograd's, one per parameter at a time; the rest as the Reducer.
class BucketTuner final : public PassObserver {
 public:
  BucketTuner(ProcessGroup group, size_t parameters) : group_(std::move(group)), now_(parameters) {}

  void begin_backward() override;
  void ready(size_t parameter) { now_.ready_ms[parameter] = since_begin_ms(); }
  void autograd_done() override { now_.backward_ms = since_begin_ms(); }
  /// Times the copies into buckets, which later take time from autograd.
  void begin_pack() override { copy_began_ms_ = since_begin_ms(); }
  void end_pack() override { now_.copy_ms += since_begin_ms() - copy_began_ms_; }
  /// Ends a measured pass: all buckets are reduced. Passes without this call do not count.
  void communicated() override;

  /// Whether any pass after the warm-up was measured.
  bool has_enough() const { return passes_.size() > kWarmUp; }

  /// \param bytes  the size of all gradients.
  /// \param messages  the number of messages in which they were sent.
  /// \param wait  waits for a collective.
  ///
  /// Collective: a few small all-reduces, which combine the ranks' times, and measure the latency.
  LinkCost link_cost(
      int64_t bytes, size_t messages, c10::function_ref<void(c10d::Work&)> wait) const;
  /// Medians over the passes; needs has_enough(). Backward includes the copies, spread evenly over
  /// it.
  StepTimes step_times() const;

  /// The first passes are slow: memory is new, and caches are cold.
  static constexpr size_t kWarmUp = 2;
  static constexpr size_t kPasses = 7;

 private:
  using Clock = std::chrono::steady_clock;

  struct Pass {
    explicit Pass(size_t parameters) : ready_ms(parameters) {}
    std::vector<double> ready_ms;
    double backward_ms = 0;
    double copy_ms = 0;
    double communication_ms = 0;
    double rest_ms = 0;  // from the end of the pass before it to its begin
  };

  double since_begin_ms() const;
  double median_of(c10::function_ref<double(const Pass&)> value) const;

  ProcessGroup group_;
  Clock::time_point begin_{};
  Clock::time_point last_end_{};
  double copy_began_ms_ = 0;
  Pass now_;
  std::vector<Pass> passes_;
};

}  // namespace ddp
