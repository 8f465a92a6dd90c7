#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/comm_hooks.h>
#include <ddp/process_group.h>
#include <ddp/reduction_stats.h>
#include <torch/arg.h>

namespace torch::autograd {
struct Node;
}

namespace ddp {

class Bucket;
class BucketTuner;
class ForwardOutputs;
class GraphSearch;
class PeerNotes;
class StepRecorder;
class StatusBoard;
struct BucketPlan;
struct PastPass;
struct Problem;
struct Whereabouts;

/// As a bucket cap: measure the first steps, and choose the cap with the least predicted step time.
constexpr double kTuneBucketCap = std::numeric_limits<double>::lowest();

/// A parameter and the name a user knows it by.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  /// Its gradients are sparse (an Embedding with `sparse=true`).
  bool expect_sparse = false;
};

/// Options of a `Reducer`; DistributedDataParallelOptions says what each means to a user.
struct ReducerOptions {
  /// Soft size of a bucket in MiB (2^20 bytes), or kTuneBucketCap. Default: unset, 1 MiB and then
  /// 25 MiB
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = {};
  /// Soft sizes of the first, second, ... bucket in MiB, the last repeating. Default: none
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// A backward pass may skip parameters. Default: false
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// `.grad` aliases the bucket's memory after the first backward pass. Default: false
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Every iteration uses the same parameters as often as the first. Default: false
  TORCH_ARG(bool, static_graph) = false;
  /// Take the times of the first ten steps (17 with kTuneBucketCap) and then of every so many; 0:
  /// of none. Default: 100
  TORCH_ARG(int64_t, stats_every) = 100;
};

/// What a forward pass led to, as far as the reducer cares.
struct ForwardOutcome {
  /// The tensors that the loss will be made of.
  std::vector<at::Tensor> outputs = {};
  /// Whether `outputs` are all of them. With find_unused_parameters, a bucket is then sent before
  /// backward ends although a parameter in it cannot get a gradient.
  bool outputs_complete = false;
  /// What this rank's gradients are multiplied by before they are summed; unset, on all ranks or on
  /// none: one over the world size, which gives the mean. Of several forwards before a backward,
  /// the last one's holds. A communication hook sees them unscaled.
  std::optional<double> scale = {};
  /// Whether the pass counts when ranks compare how many they ran before a backward, to catch one
  /// that left out a backward. An evaluation does not, unless backward passes come from those.
  bool training = true;
};

/// Turns each rank's gradients into the average over all ranks, while they are being computed.
///
/// A hook on every parameter's gradient accumulator tells the parameter's bucket. The last gradient
/// of a bucket makes it ready; ready buckets leave in launch order, each in one all-reduce (or
/// through the communication hook), while autograd goes on with earlier layers. When autograd is
/// done, one callback waits for the buckets, and every `.grad` is final when `backward()` returns
/// (on CUDA: in stream order).
///
/// What is reduced is the content of `.grad`: gradients accumulated locally before (no_sync) are
/// averaged with it. Gradients are divided by the world size before they are summed, so the sum
/// does not overflow where the average would not. A further backward pass without a forward before
/// it (retain_graph, or two forwards and two backwards) is reduced in the same way.
///
/// Errors that one rank meets during a backward pass (a parameter without gradient, a gradient of
/// the wrong dtype) do not stop its collectives: its part counts as zeros, and at the end of that
/// same backward every rank throws the same text. (Over NCCL, unless passes may skip parameters, of
/// the next one: the host does not wait for the device.) `.grad` is then unspecified, and the
/// reducer can be used again. A rank that cannot go on (an exception in its forward or backward, a
/// broken connection) leaves a note in the group's store, and the others, which look for
/// notes twice a second while they wait, stop with its text. The reducer recovers from that only if
/// every rank met it in the same place. Otherwise the group is of no more use, and its backend,
/// unless it is NCCL, is aborted: what waits in it fails, so that its destructor need not wait for
/// a rank that does not come.
///
/// Ownership: keeps the parameters and their accumulators alive; the destructor removes the hooks.
/// Threads: hooks run on autograd's threads, one per device; everything else is called from the
///   training thread.
/// Collective: construction is not; the backward that prepare_for_backward() armed is, and so is
///   the one rebuild in prepare_for_forward().
/// Source: Li et al., "PyTorch Distributed", VLDB 2020 (arXiv:2006.15704), and the behaviour of
///   c10d::Reducer, torch 2.11.0. Unlike there, errors come with names, on every rank, and without
///   NCCL at the backward that caused them; a second backward pass is never left out silently; and
///   static_graph works with passes that are not reduced in between.
class Reducer {
 public:
  /// \param parameters  in registration order, each once; at least one; the same on every rank.
  /// \param group  the ranks to average over, with a backend for the parameters' devices.
  /// \throws c10::ValueError  for no parameters, an undefined one or one that needs no gradient,
  ///         for bucket caps that are not positive or a `stats_every` that is negative, and for
  ///         kTuneBucketCap where parameters are not on the CPU or have sparse gradients.
  Reducer(
      std::vector<NamedParameter> parameters, ProcessGroup group,
      const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Called before a forward pass whose backward may be reduced. Once, when a reduced backward has
  /// shown in which order gradients become ready, it rebuilds the buckets in one rank's order.
  ///
  /// \throws c10::Error  when the last backward pass did not come to its end, unless it threw in
  ///         the same place on every rank. Waits for the other ranks to say so.
  ///
  /// Collective: in the one call that rebuilds (a broadcast of 8 bytes a parameter; where the cap
  /// is tuned, a few tiny all-reduces before it).
  ///
  /// Does nothing inside a backward pass (a checkpoint that runs forward again).
  ///
  /// \param source  the rank whose order of gradients all ranks take, if it is time to.
  void prepare_for_forward(int source = 0);

  /// Where the last backward pass failed, waits until all ranks say so, and gets over it, as
  /// prepare_for_forward() does: before other collectives of an iteration begin.
  ///
  /// \throws c10::Error  as prepare_for_forward(), and when the reducer is broken.
  void settle();

  /// Waits for a collective of a forward pass as for a bucket: until it is done, or another rank
  /// says that it failed and will not come to it.
  ///
  /// \param what  what the collective brings, for the error text.
  /// \param host_reads  the host will read it. Else, over NCCL, only the current stream waits.
  /// \throws c10::Error  when it fails; the reducer is broken then.
  void wait_before_forward(c10d::Work& work, const std::string& what, bool host_reads);

  /// Arms the reducer: the next backward pass is reduced. May be repeated before a backward pass.
  void prepare_for_backward(const ForwardOutcome& outcome = {});

  /// The next backward pass accumulates locally, unless a forward armed the reducer and its
  /// backward is still to come.
  void prepare_for_local_backward();

  /// Takes part in one reduced backward pass of the other ranks without one of its own: sends what
  /// was accumulated locally since the last reduced pass, and zeros where that is nothing.
  ///
  /// \param scale  as in ForwardOutcome.
  ///
  /// Collective: yes, exactly as a backward pass is. Blocks: host.
  void shadow_backward(std::optional<double> scale = {});

  /// Tells the other ranks that this one will not come to the next pass, in the calling thread's
  /// current exception: they stop waiting for it.
  ///
  /// \param where  what threw: "forward".
  void report_failure(const std::string& where) noexcept;

  /// Tells the other ranks that this one's forward pass threw, in the calling thread's current
  /// exception: they stop waiting for its gradients. After an evaluation nobody need be waiting, so
  /// they read it only when a collective breaks.
  ///
  /// \param training  as in ForwardOutcome.
  void report_failed_forward(bool training = true) noexcept;

  /// Something that makes the coming backward pass wrong, noticed outside of it: becomes an error
  /// at its end, on every rank.
  void report_problem(std::string what, std::string remedy);

  /// Whether gradients were accumulated since the last reduced pass, and are gone: the optimizer's
  /// zero_grad() took them. They no longer count as a use of their parameters then.
  ///
  /// Cost: a look at every parameter.
  bool forget_discarded_gradients();

  /// Replaces the averaging all-reduce. Once, before the first backward pass.
  ///
  /// \throws c10::Error  when a hook is there already, a backward pass was reduced, or the cap of
  ///         buckets is kTuneBucketCap.
  void register_comm_hook(CommHook hook);

  /// Explains a parameter that got no gradient, for the error text; "" where there is nothing to
  /// add to its name.
  void explain_missing(std::function<std::string(const NamedParameter&)> explain) {
    explain_missing_ = std::move(explain);
  }

  /// Of a bucket's parameters; and whether it is the last bucket.
  using WhenReduced = std::function<void(const std::vector<at::Tensor>& parameters, bool last)>;

  /// Calls `act` for a bucket once its gradients are final, while later buckets may still be on
  /// their way; where a pass may skip parameters (find_unused_parameters, static_graph), and while
  /// the cap is tuned, when all are there. Not in shadow_backward().
  /// What it throws comes out of that backward pass, on this rank alone. A pass that fails may have
  /// called it for all buckets but the last: for the same ones on every rank. Where the host runs
  /// ahead (NCCL) it was called for all of them, and may have been for the next pass's.
  ///
  /// \throws c10::Error  when there is one already.
  void when_reduced(WhenReduced act);

  const std::vector<NamedParameter>& parameters() const { return parameters_; }

  /// Parameter indices per bucket, in launch order.
  std::vector<std::vector<size_t>> bucket_indices() const;
  /// What was measured so far; see ReducerOptions::stats_every.
  ReductionStats stats() const;
  /// Whether the buckets are in the order in which gradients become ready.
  bool has_rebuilt_buckets() const { return order_ == Order::Rebuilt; }

 private:
  class GradientHook;
  class OutputHook;
  class Abandonment;

  enum class Phase {
    Local,     // gradients accumulate; hooks do nothing
    Armed,     // a forward asked for the next backward pass to be reduced
    Done,      // that pass was reduced; another one would be as well
    Reducing,  // between the first gradient and the end of a reduced backward pass
    Failed,    // this rank threw in a pass that the others may be waiting in
    Broken,    // the group failed: nothing can be reduced any more
  };

  // How the buckets came by their order.
  enum class Order {
    Expected,  // the reverse of registration
    Recorded,  // ready_order_ says what it should be
    Rebuilt,
    Kept,  // find_unused_parameters: no two passes need to be alike
  };

  // What the hook path knows of a parameter.
  struct Slot {
    size_t bucket = 0;
    uint32_t fired = 0;     // in this backward pass
    uint32_t expected = 1;  // gradients per backward pass; static_graph counts them
    bool ready = false;     // in this backward pass, or known to be unused
  };

  void register_hooks();
  void build_buckets(std::vector<std::vector<size_t>> plan);
  bool rebuild_is_due() const;
  BucketPlan plan_under(const std::vector<int64_t>& caps, const std::vector<size_t>& order) const;
  void rebuild_buckets(int source);
  int64_t tune();
  void record_order();
  void choose_status_storage();
  std::string failed_place() const;
  void settle_failed_pass();

  void start_pass();
  void mark_unused(const std::vector<torch::autograd::Node*>& outputs);
  void hook_outputs(const std::vector<at::Tensor>& outputs);
  void on_output();
  void on_gradient(size_t index, bool defined);
  void begin_backward();
  void count_gradient(size_t index);
  void mark_ready(size_t index);
  void note_extra_gradient(size_t index);
  void launch_ready_buckets();
  void launch(size_t index);
  bool averages_in_collective(const Bucket& bucket) const;
  double scale_in_gather(const Bucket& bucket) const;
  void start_reducing(size_t index);
  void send_status();

  void finish_backward();
  void finish_pass();
  void note_missing();
  void note_detached();
  std::string why_detached(size_t index) const;
  std::string why_missing(size_t index, const std::vector<char>& reached) const;
  void end_static_count();
  void wait_for_buckets();
  std::unique_ptr<PastPass> past_pass();
  void wait_for(const PastPass& past);
  std::vector<char> agreed_unused(PastPass& past);
  void hand_over(size_t index, const std::vector<char>& unused, bool shadowed);
  at::Tensor wait_for(Bucket& bucket, size_t index);
  void wait_for(c10d::Work& work, c10::function_ref<std::string()> place);
  void follow(const c10::intrusive_ptr<c10d::Work>& work, c10::function_ref<std::string()> place);
  void or_tell_arrivals(c10::function_ref<std::string()> place, c10::function_ref<void()> wait);
  Whereabouts whereabouts(const std::string& place) const;
  using NoteOfPass = std::optional<std::string> (PeerNotes::*)(int64_t pass) const noexcept;
  std::optional<std::string> look_up(NoteOfPass look) const;
  void look_after_peers(const std::string& place);
  void look_out_until(c10::function_ref<bool()> wait, c10::function_ref<std::string()> place);
  [[noreturn]] void throw_problems(std::vector<Problem> met);
  bool on_cpu() const { return parameters_.front().tensor.is_cpu(); }
  bool is_counting() const { return options_.static_graph() && !counted_; }

  // Runs `step`; when it throws, breaks off with a text that says what it was doing.
  void or_break_off(c10::function_ref<std::string()> doing, c10::function_ref<void()> step);
  [[noreturn]] void break_off(const std::string& text);
  void abort_group() const noexcept;
  void on_abandoned(int64_t pass, const std::exception_ptr& cause) noexcept;
  std::string rank_text() const;
  void warn_of_last_pass() const noexcept;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const ReducerOptions options_;
  std::vector<int64_t> caps_;
  std::function<std::string(const NamedParameter&)> explain_missing_;

  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // by parameter
  std::vector<uintptr_t> hook_keys_;                                  // by parameter
  std::shared_ptr<Reducer*> self_;  // for hooks on nodes that may outlive this; emptied at the end
  std::unique_ptr<GraphSearch> search_;
  CommHook comm_hook_;
  WhenReduced when_reduced_;
  std::exception_ptr when_reduced_threw_;  // in this pass; it calls no more then

  std::atomic<Phase> phase_{Phase::Local};
  std::atomic<bool> callback_queued_{false};
  std::string broken_because_;
  int64_t pass_ = 1;  // the reduced backward pass that comes or goes on
  std::unique_ptr<ForwardOutputs> outputs_;
  uint64_t training_forwards_ = 0;
  int64_t waits_before_forward_ = 0;    // that are over, in all passes
  std::optional<double> scale_;         // of this pass, as in ForwardOutcome
  bool shadowing_ = false;              // this pass is the other ranks'
  bool armed_by_evaluation_ = false;    // and by nothing else
  bool reduces_in_evaluation_ = false;  // as fine-tuning in eval() mode does

  std::vector<Slot> slots_;             // by parameter
  std::vector<Bucket> buckets_;         // in launch order
  std::atomic<size_t> next_bucket_{0};  // the first that was not launched in this backward pass
  std::atomic<uint32_t> launch_requests_{0};  // each device has an autograd thread; one launches

  Order order_ = Order::Expected;
  int passes_to_record_ = 1;         // until ready_order_ is what all ranks go by
  bool counted_ = false;             // static_graph: this rank's first pass was
  std::vector<size_t> ready_order_;  // of the first pass that shows it
  std::atomic<size_t> ready_count_{0};

  std::unique_ptr<StatusBoard> status_;
  bool status_in_last_bucket_ = false;
  c10::intrusive_ptr<c10d::Work> status_work_;         // when no bucket carries it
  const bool runs_ahead_;                              // the host, of the device
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;  // of this pass, where it does
  std::unique_ptr<PastPass> past_;                     // the last one, where it does
  std::unique_ptr<PeerNotes> notes_;
  std::unique_ptr<StepRecorder> recorder_;
  std::unique_ptr<BucketTuner> tuner_;  // until the caps are chosen
  std::optional<BucketCapTuning> tuning_;
  int64_t rebuilds_ = 0;
  int64_t rebuilt_at_ = 0;    // the pass before which they last were
  std::string failed_again_;  // what came behind the failure of this pass
  std::vector<char> used_;    // by parameter: had a gradient since the last reduced backward pass
  std::vector<char> known_unused_;  // by parameter: was without a gradient before
  std::mutex problems_mutex_;
  std::vector<Problem> problems_;       // for the next status
  std::vector<Problem> sent_problems_;  // with this pass's
};

}  // namespace ddp
