#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/reducer.h>

#include "autograd_hooks.h"
#include "backward_pass.h"
#include "bare_gradients.h"
#include "bucket_reduction.h"
#include "bucket_schedule.h"
#include "bucket_set.h"
#include "bucket_tuner.h"
#include "status_agreement.h"
#include "step_recorder.h"
#include "usage_policy.h"

namespace ddp {

/// The conductor: what happens when, of which its parts know how.
///
/// One gradient's way, in eight files, each read once:
///   1. autograd_hooks.cpp: GradientHook, on the parameter's accumulator, says on_gradient(); the
///      final callback of autograd says on_backward_done().
///   2. engine_backward.cpp: on_gradient() finds that the gradient's bucket is complete, and
///      launch_ready_buckets() launches it in its turn; the last one leaves in launch_rest(). A
///      launch packs the bucket and starts its reduction.
///   3. backward_pass.h: count() and complete_one(), by which (2) knows that.
///   4. bucket.cpp: pack() brings the gradient into the bucket's storage.
///   5. bucket_reduction.cpp: start() hands the storage to the all-reduce or the hook.
///   6. engine_finish.cpp: finish_pass() waits for the buckets, looks at what the ranks agree on
///      (StatusAgreement), and finalizes one bucket after another.
///   7. bucket_unpack.cpp: unpack() gives each parameter its part.
///   8. copied_gradients.cpp, or viewed_gradients.cpp: put() makes `.grad` the average.
/// Large ones go (2), (4), (5) and (7) without a bucket's storage, as direct_gradient.cpp says.
class Reducer::Engine final : public AutogradEvents {
 public:
  Engine(
      std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
      std::shared_ptr<GroupMonitor> monitor);
  ~Engine();

  void prepare_for_forward(bool training);
  void prepare_for_backward(const ForwardOutcome& outcome);
  void prepare_for_local_backward();
  void forward_failed(bool training) noexcept;
  void join_backward(const PassTerms& terms);
  void register_comm_hook(CommHook hook);
  std::shared_ptr<GradientShards> shard_gradients();
  void when_reduced(WhenReduced act);
  ReductionStats stats() const;

  void on_output() override;
  void on_gradient(size_t parameter, bool defined) override;
  void on_backward_done() override;
  void on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept override;

  const BucketSet& buckets() const { return buckets_; }
  const BucketSchedule& schedule() const { return schedule_; }
  GroupMonitor& monitor() const { return *monitor_; }
  UsagePolicy& usage() { return *usage_; }
  StatusAgreement& status() { return status_; }
  void travel_with(PassCompanion& companion) { companion_ = &companion; }

 private:
  enum class Phase {
    Idle,      // no forward pass has come yet
    Local,     // gradients accumulate; hooks do nothing
    Armed,     // a forward asked for the next backward pass to be reduced
    Done,      // that pass was reduced; another one would be as well
    Reducing,  // between the first gradient and the end of a reduced backward pass
  };

  /// Those who watch the passes. The tuner is there until the cap is chosen.
  struct Observers {
    StepRecorder recorder;
    bool tunes = false;  // the user asked for it
    std::unique_ptr<BucketTuner> tuner;
    std::optional<BucketCapTuning> tuned;

    template <typename Event>
    void tell(const Event& event) {
      event(static_cast<PassObserver&>(recorder));
      if (tuner) event(static_cast<PassObserver&>(*tuner));
    }
  };

  // engine.cpp: between passes
  void begin_pass(int64_t number);
  void check_reduction_may_change(const char* what) const;
  void check_capture() const;
  void follow_parameters();
  void place_status();
  void rebuild_buckets();
  void warn_of_last_pass() const noexcept;
  std::string describe_own_problems(const BackwardPass& pass) const;
  c10::Device device() const { return buckets_.parameters().front().tensor.device(); }
  bool runs_ahead() const { return status_.defers(); }

  // engine_backward.cpp: while autograd runs
  void begin_backward();
  void note_bare_gradient(size_t parameter);
  void tell_bare_step(size_t parameter) const;
  void launch_ready_buckets();
  void launch_until_served();
  void begin_at_end();
  void launch_rest();
  void launch(size_t b);
  void pack(size_t b);
  void send_status();

  // engine_finish.cpp: the end of a pass
  void finish_pass();
  void wait_for_buckets();
  void wait_for_bucket(size_t b);
  void wait_for(c10d::Work& work, WaitPoint where);
  void follow(const c10::intrusive_ptr<c10d::Work>& work, WaitPoint where);
  BackwardPass* await_verdict();
  void judge_capture();
  void await(BackwardPass& pass);
  std::string objection_to(BackwardPass& pass, std::vector<char>& unused);
  void finalize_bucket(size_t b, const std::vector<char>& unused);
  void end_pass();

  // engine_order.cpp: which gradients travel together, once it is known
  void agree_on_order();
  int64_t tune();

  const ProcessGroup group_;
  const std::shared_ptr<GroupMonitor> monitor_;
  BucketSet buckets_;
  BucketSchedule schedule_;
  AutogradHooks hooks_;
  const std::unique_ptr<UsagePolicy> usage_;
  StatusAgreement status_;
  std::unique_ptr<BucketReduction> reduction_;
  Observers observers_;
  BareGradients bare_;
  std::atomic<Phase> phase_{Phase::Idle};
  std::unique_ptr<BackwardPass> pass_;      // that comes, or goes on
  std::unique_ptr<BackwardPass> deferred_;  // the one before, where the verdict on it is due later
  WhenReduced when_reduced_;
  PassCompanion* companion_ = nullptr;
  bool has_own_reduction_ = false;  // a communication hook, or sharded gradients
};

}  // namespace ddp
