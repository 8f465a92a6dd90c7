#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/mixed_precision.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace ddp {

/// As a bucket cap: measure the first steps, and choose the cap with the least predicted step time.
constexpr double kTuneBucketCap = std::numeric_limits<double>::lowest();

/// How the ranks' gradients are combined.
enum class Reduction {
  /// The mean over ranks with equal weights: right where batches have equal sizes and the loss is a
  /// mean over the batch.
  Mean,
  /// The sum over ranks: for a loss that is a sum over the batch.
  Sum,
  /// The mean over ranks, weighted by each rank's number of samples since the last averaged
  /// backward pass: equals the gradient of one process over all samples even where batches differ
  /// in size, for a loss that is a mean over the batch. A forward pass has as many samples as its
  /// first tensor argument has rows; see `count_samples`. Costs one small all-reduce per backward
  /// pass.
  SampleWeighted,
};

/// Options for `DistributedDataParallel`, named as Python's arguments.
///
/// Example:
/// ```
/// ddp::DistributedDataParallel model(
///     net, ddp::DistributedDataParallelOptions().bucket_cap_mb(10).gradient_as_bucket_view(true));
/// ```
struct DistributedDataParallelOptions {
  /// The ranks to train with. Where layers are cut over some of them, the axis of their replicas:
  /// `mesh.group("dp")`. Default: the default group
  TORCH_ARG(GroupArg, process_group) = {};
  /// The one CUDA device of this rank's module. Arguments of `forward` are moved there: tensors,
  /// and copies of vectors, arrays, pairs, tuples, maps and optionals of them and of types with a
  /// `move_tensors` (see move_tensors.h), nested in any way. What `forward` writes into such a copy
  /// is lost. Default: none, arguments stay where they are
  TORCH_ARG(std::vector<c10::Device>, device_ids) = {};
  /// Broadcast rank 0's buffers (BatchNorm's statistics) with each averaged backward pass; at its
  /// end all ranks have them. Buffers that a program changes between steps are sent with the next
  /// pass; `sync_buffers()` sends them at once. False: each rank keeps its own. Default: true
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// What Python has in place of broadcast_buffers since 2.13: the same, but with false, too,
  /// construction broadcasts rank 0's buffers. Where it is set, broadcast_buffers is ignored.
  /// Default: unset
  TORCH_ARG(std::optional<bool>, forward_sync_buffers) = {};
  /// Compare the ranks' models at construction, and broadcast rank 0's parameters, and its buffers
  /// where broadcast_buffers or forward_sync_buffers is set. Default: true
  TORCH_ARG(bool, init_sync) = true;
  /// Soft size of a gradient bucket in MiB (2^20 bytes): a bucket is full when it reaches it.
  /// kTuneBucketCap measures the first seven reduced steps (with static_graph eight), in which all
  /// gradients are sent after backward, in one piece for each dtype, and takes the size with the
  /// least predicted step time; `stats()` has it.
  /// It is for dense gradients on CPUs without a communication hook, and changes nothing on one
  /// rank. Default: unset, 1 MiB for the bucket that is ready first and 25 MiB for the others
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = {};
  /// Soft sizes of the first, second, ... bucket in MiB, the last repeating; instead of
  /// bucket_cap_mb. Default: none
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// How gradients are combined: mean over ranks, sum, or weighted by samples. Default: Mean
  TORCH_ARG(Reduction, reduction) = Reduction::Mean;
  /// Let a backward pass skip parameters: a parameter that no rank used keeps its gradient, and one
  /// that some ranks used gets the average with zeros from the others. A gradient penalty with a
  /// backward pass of its own needs it. Default: false
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Let `.grad` share the buckets' memory permanently: its memory stays the same in every pass.
  /// False: each gradient has memory of its own. Default: false
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Give buckets memory only from the moment when their gradients are there to the end of the
  /// backward pass, so that activations and buckets are not in memory together; with
  /// gradient_as_bucket_view until the gradients are cleared. Costs allocations in each pass. With
  /// a ZeroRedundancyOptimizer of stage 2 the memory of one bucket stays. Default: false
  TORCH_ARG(bool, lazy_bucket_allocation) = false;
  /// Every iteration uses the same parameters, each as often as in the first. Allows parameters
  /// that a rank never uses and ones that get several gradients in one backward pass (reentrant
  /// checkpointing) without looking for them each time. The first reduced backward pass only counts
  /// gradients, and is reduced at its end. Default: false
  TORCH_ARG(bool, static_graph) = false;
  /// Measure the times of the first ten steps (17 with kTuneBucketCap), and then of one step in so
  /// many, for `stats()`; 0: of no step. Default: 100
  TORCH_ARG(int64_t, stats_every) = 100;
  /// Look for the first gradient that is infinite or NaN, on each rank before the ranks' gradients
  /// are combined: the averaged backward pass then throws on every rank, and names the rank, the
  /// parameter and the pass. On a GPU the next pass throws, or settle(). `.grad` is unspecified
  /// then, and step_in_backward() may have stepped. Leave it out with a GradScaler, whose first
  /// steps overflow as a rule: it skips these. A captured step is not looked at. Same on all ranks.
  /// Cost: looks at each gradient once, while it is copied. Default: false
  TORCH_ARG(bool, find_nonfinite) = false;
  /// Compare a hash of the ranks' parameters in the first averaged backward pass (also the first
  /// after a refresh()) and in one pass of so many; a pass in which they differ throws as
  /// `check_replicas()` does. 0: in no pass. In a join() only in the first. Cost of such a pass:
  /// reads every byte of the parameters, and one all-reduce of 16 bytes; the first needs no
  /// communication of its own. Default: unset, in the first pass only, unless init_sync is false
  TORCH_ARG(std::optional<int64_t>, check_replicas_every) = {};
  /// Name the ranks that are wrong where a comparison of check_replicas_every or check_replicas()
  /// finds that ranks differ: those outside of the majority; of two ranks, and without a majority,
  /// all. Replicas are equal to the bit, so that one which differs alone has a fault of its
  /// hardware, or a program that did something on it alone. `Elastic` replaces such ranks from the
  /// memory of the others. Needs passes that are compared: where check_replicas_every is unset,
  /// one in 50. Same on all ranks. Cost: nothing where ranks are equal. Default: false
  TORCH_ARG(bool, vote) = false;
  /// Compute the micro-batch of each rank once more on the next rank, in one averaged pass of so
  /// many, and compare bits: of what `forward` returned, and of the gradients before the ranks'
  /// average. Where they differ a third rank computes it, too, and the pass throws on every rank
  /// and names the wrong one; of two ranks both. The last forward pass before the backward pass
  /// counts; where there were several, and where parameters have hooks of the program, its outputs
  /// alone. No gradient, buffer or generator changes. 0: in no pass.
  ///
  /// For modules that are deterministic and communicate nothing, whose `forward` changes nothing
  /// but buffers, with arguments that are tensors, numbers, strings, and optionals, vectors,
  /// arrays, pairs, tuples and ordered maps of them: not for run(), scripts, sparse gradients and
  /// MixedPrecision. A pass of a join() or a sync_in_backward() is not repeated. Same on all ranks.
  /// Cost of such a pass: one forward and backward pass more, and the batch sent once. Default: 0
  TORCH_ARG(int64_t, replay_every) = 0;
  /// Compare a hash of the arguments of `forward` in the first three averaged passes, and warn once
  /// where all ranks had the same: their loaders have no DistributedSampler, or ranks draw alike.
  /// Arguments that do not change from pass to pass tell nothing. Costs then 32 KiB read of each
  /// tensor, up to 15 rows copied of one that is not contiguous, and one all-reduce of 16 bytes in
  /// all. Default: true
  TORCH_ARG(bool, check_inputs) = true;
  /// Full names of parameters and buffers ("block.0.weight") that are neither compared, broadcast
  /// nor averaged: each rank keeps its own. Default: none
  TORCH_ARG(std::vector<std::string>, parameters_to_ignore) = {};

 public:
  /// FullyShardedOptions' name of parameters_to_ignore.
  DistributedDataParallelOptions& ignored_parameters(std::vector<std::string> names) {
    return parameters_to_ignore(std::move(names));
  }
  /// Parameters, forward and the average in 16 bits, with float32 for the optimizer. Ignored
  /// parameters and buffers keep their dtype. Default: everything in the module's own dtypes
  TORCH_ARG(MixedPrecision, mixed_precision) = {};
};

}  // namespace ddp
