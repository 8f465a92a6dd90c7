#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/reducer.h>

#include "autograd/autograd_hooks.h"
#include "autograd/early_failures.h"
#include "autograd/usage_policy.h"
#include "buckets/bucket_set.h"
#include "gradients/averaged_gradients.h"
#include "pass/backward_pass.h"
#include "reduction/bucket_reduction.h"
#include "reduction/bucket_schedule.h"
#include "stats/bucket_tuner.h"
#include "stats/compute_timer.h"
#include "stats/rate.h"
#include "stats/step_recorder.h"
#include "status/status_agreement.h"

namespace ddp {

/// Runs the reduced backward passes: decides when each step happens; the parts do the work.
///
/// The path of one gradient, in nine files, each read once:
///   1. autograd_hooks.cpp: GradientHook, on the parameter's accumulator, calls on_gradient(); the
///      final callback of autograd calls on_backward_done().
///   2. engine_backward.cpp: on_gradient() finds that the gradient's bucket is complete, and
///      launch_ready_buckets() launches the buckets in order; launch_rest() launches the last one.
///      A launch packs the bucket and starts its reduction.
///   3. backward_pass.h: count() and complete_one() find whether a bucket is complete, for (2).
///   4. bucket.cpp: pack() copies the gradient into the bucket's storage.
///   5. bucket_reduction.cpp: start() passes the storage to the all-reduce or the hook.
///   6. engine_finish.cpp: finish_pass() waits for the buckets, reads the status that the ranks
///      agreed on (StatusAgreement), and finalizes one bucket after another.
///   7. bucket.cpp: unpack() gives each parameter its part.
///   8. gradient_placement.cpp: put() makes `.grad` the average, to which averaged_gradients.cpp
///      adds those of earlier passes.
/// Large gradients pass (2), (4), (5) and (7) without a bucket's storage: see direct_gradient.cpp.
class Reducer::Engine final : public AutogradEvents {
 public:
  Engine(
      std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
      std::shared_ptr<GroupMonitor> monitor);
  ~Engine();

  void prepare_for_forward();
  void prepare_for_backward(const ForwardOutcome& outcome);
  void prepare_for_local_backward();
  void join_backward(const PassTerms& terms);       // engine_backward.cpp
  void require_manual_finalization(bool required);  // engine_manual.cpp
  void finalize_backward();
  bool should_finalize_after_backward() const;
  void register_comm_hook(CommHook hook);
  void reduce_in(at::ScalarType dtype);
  std::shared_ptr<GradientShards> shard_gradients();
  void set_bucket_order(const BucketOrder& order);  // engine_order.cpp
  void on_bucket_reduced(OnBucketReduced act);
  void settle();  // engine_finish.cpp
  ReductionStats stats() const;
  void count_trained(int64_t samples) { observers_.rate.count(samples); }

  void on_output() override;
  void before_gradient(size_t parameter) override;
  void on_gradient(size_t parameter, bool defined) override;
  void on_backward_done() override;
  void on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept override;

  bool is_reducing() const { return phase_ == Phase::Reducing; }
  bool awaits_finalization() const { return phase_ == Phase::Sent; }
  bool has_averages() const { return averaged_.any(); }
  bool accumulates() const { return hooks_.accumulates(); }
  const BucketSet& buckets() const { return buckets_; }
  const BucketSchedule& schedule() const { return schedule_; }
  GroupMonitor& monitor() const { return *monitor_; }
  UsagePolicy& usage() { return *usage_; }
  StatusAgreement& status() { return status_; }
  void set_companion(PassCompanion& companion) { companion_ = &companion; }

 private:
  enum class Phase {
    Idle,      // before the first forward pass
    Local,     // gradients accumulate; hooks do nothing
    Armed,     // a forward asked for the next backward pass to be reduced
    Selected,  // the next backward pass through the known outputs is reduced; others are local
    Done,      // that pass was reduced; a further backward pass would be reduced as well
    Reducing,  // between the first gradient and the end of a reduced backward pass
    Sent,      // that pass has sent its buckets, and waits for finalize_backward()
  };

  /// Everything that measures the passes. The tuner exists until the cap is chosen.
  struct Observers {
    StepRecorder recorder;
    ComputeTimer timer;
    std::deque<TimesOfRanks> times = {};  // of the last steps, as the ranks exchanged them
    Rate rate = {};
    bool tunes = false;  // the user asked for it
    std::unique_ptr<BucketTuner> tuner = {};
    std::optional<BucketCapTuning> tuned = {};

    template <typename Event>
    void notify(const Event& event) {
      event(static_cast<PassObserver&>(recorder));
      event(static_cast<PassObserver&>(timer));
      if (tuner) event(static_cast<PassObserver&>(*tuner));
    }
    void skip_step() {
      recorder.skip_step();
      timer.skip_step();
    }
    void keep(TimesOfRanks of_step) {
      if (of_step.empty()) return;
      times.push_back(std::move(of_step));
      if (times.size() > kStragglerRows) times.pop_front();
    }
  };

  // engine.cpp: between passes
  void begin_pass(int64_t number);
  void check_reduction_may_change(const char* what) const;
  void replace_all_reduce(std::unique_ptr<BucketReduction> reduction);
  void check_capture() const;
  void refresh_hooks();
  void choose_status_location();
  void rebuild_buckets();
  void warn_of_last_pass() const noexcept;
  std::string describe_own_problems(const BackwardPass& pass) const;
  c10::Device device() const { return buckets_.parameters().front().tensor.device(); }
  bool runs_ahead() const { return status_.defers(); }

  // engine_backward.cpp: while autograd runs
  bool belongs_to_reduced_pass() const;
  void begin_backward();
  void on_early_failure(const std::exception_ptr& cause) noexcept;
  void set_average_aside(size_t parameter, bool is_reduced);
  void note_unaveraged_gradient(size_t parameter);
  void warn_unaveraged_step(size_t parameter) const;
  void launch_ready_buckets();
  void drain_launch_queue();
  void begin_companion();
  void begin_after_autograd();
  void launch_rest();
  void launch(size_t b);
  void make_room_for(size_t b);
  void pack(size_t b);
  void report_nonfinite();
  void send_status();
  void send_rest();

  // engine_manual.cpp
  void check_finalized() const;

  // engine_finish.cpp: the end of a pass
  void finish_pass();
  void wait_for_buckets(bool finalizes);
  void wait_for_bucket(size_t b);
  void wait_for(c10d::Work& work, WaitPoint where);
  void wait_on_stream(const c10::intrusive_ptr<c10d::Work>& work, WaitPoint where);
  std::string deferred_error();
  void check_captured_pass();
  std::string own_error(std::vector<char>& unused);
  void wait_for_pass_status(BackwardPass& pass);
  std::string error_of_pass(BackwardPass& pass, std::vector<char>& unused);
  void finalize_bucket(size_t b, const std::vector<char>& unused);
  void end_pass();

  // engine_order.cpp: after the first passes, the ranks agree on the buckets
  void agree_on_order();
  void take_order(std::vector<size_t> order, std::optional<int64_t> cap);
  int64_t tune();

  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  BucketSet buckets_;
  BucketSchedule schedule_;
  AutogradHooks hooks_;
  EarlyFailures early_failures_;
  const std::unique_ptr<UsagePolicy> usage_;
  StatusAgreement status_;
  std::unique_ptr<BucketReduction> reduction_;
  Observers observers_;
  UnaveragedGradients unaveraged_;
  AveragedGradients averaged_;
  std::atomic<Phase> phase_{Phase::Idle};
  std::unique_ptr<BackwardPass> pass_;      // the current or next pass
  std::unique_ptr<BackwardPass> deferred_;  // the previous pass, whose status is not read yet
  OnBucketReduced on_bucket_reduced_;
  PassCompanion* companion_ = nullptr;
  const bool finds_nonfinite_;
  bool has_own_reduction_ = false;  // a communication hook, or sharded gradients
  bool finalizes_by_hand_ = false;
  const std::shared_ptr<std::function<void()>> settling_;  // of GroupMonitor::add_settling()
};

}  // namespace ddp
