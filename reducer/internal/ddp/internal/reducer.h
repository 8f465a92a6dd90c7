#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/comm_hooks.h>
#include <ddp/internal/bucket_plan.h>
#include <ddp/internal/gradient_shards.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/pass_companion.h>
#include <ddp/process_group.h>
#include <ddp/reduction_stats.h>
#include <torch/arg.h>

namespace ddp {

/// A parameter and its name in the user's module.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  /// Its gradients are sparse (an Embedding with `sparse=true`).
  bool expect_sparse = false;
  /// It belongs to no module, so that the outputs of forward need not lead to it.
  bool is_outside = false;
};

/// Whether a reducer averages the gradients of this accumulator.
bool is_averaged(const torch::autograd::Node& accumulator);

/// Options of a `Reducer`; DistributedDataParallelOptions says what each means to a user.
struct ReducerOptions {
  /// Soft size of a bucket in MiB (2^20 bytes). Default: unset, 1 MiB and then 25 MiB
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = {};
  /// Measure the first steps, and choose the cap with the least predicted step time; instead of
  /// bucket_cap_mb. Default: false
  TORCH_ARG(bool, tune_bucket_cap) = false;
  /// Soft sizes of the first, second, ... bucket in MiB, the last repeating. Default: none
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// A backward pass may skip parameters. Default: false
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// `.grad` aliases the bucket's memory after the first backward pass. Default: false
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Buckets have memory only from their launch to the end of the pass. Default: false
  TORCH_ARG(bool, lazy_bucket_allocation) = false;
  /// Every iteration uses the same parameters as often as the first. Default: false
  TORCH_ARG(bool, static_graph) = false;
  /// Take the times of the first ten steps (17 with tune_bucket_cap), and then of every step whose
  /// number is a multiple of this; 0: of none. Default: 100
  TORCH_ARG(int64_t, stats_every) = 100;
  /// A gradient that is infinite or NaN is an error of its pass. Default: false
  TORCH_ARG(bool, find_nonfinite) = false;
};

/// The results of a forward pass that the reducer needs.
struct ForwardOutcome {
  /// The tensors from which the loss is computed.
  std::vector<at::Tensor> outputs = {};
  /// Whether `outputs` are all of them. With find_unused_parameters, a bucket is then sent before
  /// backward ends although a parameter in it cannot get a gradient.
  bool outputs_complete = false;
  /// The terms of the next backward pass; of several forwards before it, the last one's count.
  PassTerms terms = {};
  /// Reduce only a backward pass through `outputs`: others before it accumulate locally.
  bool only_through_outputs = false;
};

/// The reason why a parameter can no longer get a gradient; empty where it can.
struct MissingGradient {
  std::string why;  // "frozen after the module was wrapped"
  std::string remedy;
};

/// Turns each rank's gradients into the average over all ranks, while they are being computed.
///
/// A hook on every parameter's gradient accumulator counts the gradients of the parameter's bucket.
/// The last gradient of a bucket makes it ready; ready buckets are launched in order, each as one
/// all-reduce (or through the communication hook), while autograd computes earlier layers. After
/// autograd, one callback waits for the buckets, and every `.grad` is final when `backward()`
/// returns (on CUDA: in stream order).
///
/// The reducer averages what was added to `.grad` since the last reduced pass, which includes
/// gradients accumulated locally (no_sync). Averages of earlier passes that `.grad` still holds
/// stay as they are: reduced passes add up. Gradients are divided by the world size before they are
/// summed, so the sum does not overflow where the average would not. A further backward pass
/// without a forward before it (retain_graph, or two forwards and two backwards) is reduced in the
/// same way.
///
/// Errors that one rank meets during a backward pass (a parameter without gradient, a gradient of
/// the wrong dtype) do not stop its collectives: its part counts as zeros, and at the end of that
/// same backward every rank throws the same text. (Over NCCL, unless passes may skip parameters, at
/// the end of the next backward: the host does not wait for the device.) `.grad` is then
/// unspecified, and the reducer can be used again. An exception in a backward pass aborts the
/// group.
///
/// Ownership: keeps the parameters and their accumulators alive; the destructor removes the hooks.
/// Threads: hooks run on autograd's threads, one per device; everything else is called from the
///   training thread.
/// Collective: the backward pass that prepare_for_backward() armed, and join_backward(). Nothing
///   else.
/// Source: Li et al., "PyTorch Distributed", VLDB 2020 (arXiv:2006.15704), and the behaviour of
///   c10d::Reducer, torch 2.11.0.
class Reducer {
 public:
  /// \param parameters  in registration order, each once; at least one; the same on every rank.
  /// \param group  the ranks to average over, with a backend for the parameters' devices.
  /// \param monitor  the group's; null: monitor_of(group).
  /// \throws c10::ValueError  for no parameters, an undefined one or one that needs no gradient,
  ///         for bucket caps that are not positive or a `stats_every` that is negative, and for
  ///         tune_bucket_cap where parameters are not on the CPU or have sparse gradients.
  Reducer(
      std::vector<NamedParameter> parameters, ProcessGroup group,
      const ReducerOptions& options = {}, std::shared_ptr<GroupMonitor> monitor = {});
  ~Reducer();
  C10_DISABLE_COPY_AND_ASSIGN(Reducer);

  /// Called before a forward pass whose backward may be reduced. Rebuilds the buckets once the
  /// ranks have agreed on their order. Does nothing inside a backward pass (a checkpoint that runs
  /// forward again).
  ///
  /// \throws c10::DistBackendError  when the group is aborted.
  void prepare_for_forward();

  /// Arms the reducer: the next backward pass is reduced. May be repeated before a backward pass.
  void prepare_for_backward(const ForwardOutcome& outcome = {});

  /// Makes the next backward pass accumulate locally, unless it runs through outputs of a forward
  /// pass that armed the reducer.
  void prepare_for_local_backward();

  /// Whether a reduced backward pass runs. If it throws, it ends the other ranks' waits.
  bool is_reducing() const;

  /// From now on a reduced backward pass only sends its buckets; finalize_backward() ends it.
  ///
  /// \throws c10::Error  between a forward pass and the end of its reduced backward pass.
  void require_manual_finalization(bool required);

  /// Waits for the buckets of a reduced backward pass and makes `.grad` the averages. After the
  /// pass, or in a hook of it once all gradients are there.
  ///
  /// \throws c10::Error  where no pass waits for it, or gradients are missing; else as a backward
  ///         pass.
  ///
  /// Collective: yes, as the end of a backward pass. Blocks: host.
  void finalize_backward();

  /// Whether finalize_backward() has to wait for the end of the coming backward pass.
  bool should_finalize_after_backward() const;

  /// Whether a reduced backward pass is sent, and not finalized.
  bool awaits_finalization() const;

  /// Joins one reduced backward pass of the other ranks without one of its own: sends the gradients
  /// accumulated locally since the last reduced pass, and zeros for parameters without any.
  ///
  /// Collective: yes, like a backward pass after the companion's begin(). Blocks: host.
  void join_backward(const PassTerms& terms = {});

  /// Whether `.grad` of any parameter holds an average of an earlier pass, so that the next one
  /// adds to it.
  ///
  /// Cost: a look at every parameter.
  bool has_averages() const;

  /// Whether the backward pass that the calling thread runs accumulates gradients of the
  /// parameters: torch::autograd::grad does not.
  bool accumulates() const;

  /// Reports a problem of the next backward pass that was found outside of it: every rank throws at
  /// the end of that pass.
  void report_problem(std::string what, std::string remedy);

  /// Clears the usage of all parameters if gradients accumulated since the last reduced pass, and
  /// the optimizer's zero_grad() removed them.
  ///
  /// \return whether it did.
  /// Cost: a look at every parameter.
  bool clear_usage_of_zeroed_grads();

  /// Waits for the status of the last reduced pass, where the host runs ahead of the device, and
  /// throws its problems, the same on every rank.
  ///
  /// Collective: yes. Blocks: host.
  void settle();

  /// Replaces the averaging all-reduce. Once, before the first backward pass.
  ///
  /// \throws c10::Error  when there is a hook already, a backward pass was reduced, or the cap of
  ///         buckets is tuned.
  void register_comm_hook(CommHook hook);

  /// Averages in a dtype of fewer bits from now on. Otherwise as register_comm_hook().
  void reduce_in(at::ScalarType dtype);

  /// Reduce-scatters from now on: each rank gets its parts of the averages, and `.grad` is
  /// undefined after a reduced pass. Once, before the first backward pass. The buckets are then
  /// final, and share one memory: each is packed after the one before is reduced.
  ///
  /// \return  this rank's parts, by bucket. A pass that fails leaves them unspecified.
  /// \throws c10::Error  when there is a hook, a backward pass was reduced, the cap of buckets is
  ///         tuned, or gradients are sparse.
  std::shared_ptr<GradientShards> shard_gradients();

  /// Returns the reason why each of `parameters`, indices into parameters(), got no gradient.
  using ExplainMissing =
      std::function<std::vector<MissingGradient>(const std::vector<size_t>& parameters)>;

  /// Sets the function that explains missing gradients in the error text.
  void explain_missing(ExplainMissing explain);

  /// Called with a bucket's parameters, and whether it is the last bucket.
  using OnBucketReduced = std::function<void(const std::vector<at::Tensor>& parameters, bool last)>;

  /// Calls `act` once for each bucket of a reduced pass, in launch order, when its gradients are
  /// final:
  ///   - while later buckets may still be reduced;
  ///   - after all buckets are reduced, where a pass may skip parameters (find_unused_parameters,
  ///     static_graph), and while the cap is tuned.
  ///
  /// In a pass that ends with an error of every rank, `act` was called for the same buckets on
  /// each:
  ///   - for all but the last, or for none;
  ///   - where the host runs ahead (NCCL), for all, and perhaps for those of the next pass.
  ///
  /// If `act` throws, that backward pass throws its exception, on this rank alone, and the group is
  /// aborted with its text once the other ranks have had their calls.
  ///
  /// \throws c10::Error  when there is one already.
  void on_bucket_reduced(OnBucketReduced act);

  /// Sends the data of `companion`, which must outlive the reducer, with each reduced pass.
  void set_companion(PassCompanion& companion);

  const std::vector<NamedParameter>& parameters() const;
  GroupMonitor& monitor() const;

  /// Parameter indices per bucket, in launch order.
  std::vector<std::vector<size_t>> bucket_indices() const;
  /// The order that the ranks agreed on; empty before that, and where they never do.
  BucketOrder bucket_order() const;
  /// Uses the order of a reducer of the same parameters and options from the first pass on. Once,
  /// before the first backward pass and before register_comm_hook().
  void set_bucket_order(const BucketOrder& order);
  /// Counts what was trained since the last reduced pass, for ReductionStats::trained_per_second.
  void count_trained(int64_t samples);
  /// The measurements so far; see ReducerOptions::stats_every.
  ReductionStats stats() const;
  /// Whether the buckets are in the order in which gradients become ready.
  bool has_rebuilt_buckets() const;

 private:
  class Engine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace ddp
