#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ddp/comm_hooks.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

namespace ddp::hooks {

/// Options for `PowerSGD`; the same on all ranks.
struct PowerSGDOptions {
  /// The rank r of the approximation that is sent instead of an n x m gradient: (n + m) r elements.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// The number of first steps that average as without a hook: early gradients change fast. At
  /// least 2 with use_error_feedback or warm_start.
  TORCH_ARG(int64_t, start_iter) = 1000;
  /// A gradient is compressed where that makes it smaller by more than this factor.
  TORCH_ARG(double, min_compression_rate) = 2.0;
  /// Whether the error of compression is added to the next step's gradient. Costs the memory of all
  /// gradients.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Whether a step begins with the previous step's directions, not with random ones.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to the length by which a column is divided, for ranks 1 and 2 and half precision.
  TORCH_ARG(double, orthogonalization_epsilon) = 0.0;
  /// Seed of the random directions; the same on all ranks, as every option.
  TORCH_ARG(int64_t, random_seed) = 0;
  /// Whether gradients of one shape in a bucket are multiplied in one call.
  TORCH_ARG(bool, batch_tensors_with_same_shape) = false;
};

/// Counts of elements since compression began: before compression, and sent.
struct CompressionStats {
  int64_t numel_before = 0;  ///< that were to be averaged
  int64_t numel_after = 0;   ///< that were sent
  /// numel_before / numel_after; 0 where nothing was sent.
  double rate() const {
    return numel_after > 0 ? static_cast<double>(numel_before) / static_cast<double>(numel_after)
                           : 0.0;
  }
};

/// One line of text: elements before and after, and their rate.
DDP_API std::string summary(const CompressionStats& stats);

/// Averages a low-rank approximation of every gradient in place of the gradient (Vogels et al.,
/// "PowerSGD", 2019, https://arxiv.org/abs/1905.13727), with the random numbers of Python's
/// `powerSGD_hook`. A gradient counts as a matrix of its first dimension by all others; those that
/// would not shrink enough are averaged whole.
///
/// ```
/// ddp::hooks::PowerSGD power_sgd(ddp::hooks::PowerSGDOptions().matrix_approximation_rank(4));
/// model->register_comm_hook(power_sgd);
/// checkpointer.add_per_rank("power_sgd", power_sgd);  // the compression error is each rank's own
/// ```
///
/// Use one object for one wrapper. A copy shares its state. Thread safety: none; call stats() and
/// save() between steps.
///
/// Differences from Python: a bucket's second collective starts when the next bucket is ready, so
/// that ranks cannot disagree about the order; a direction of length 0 is 0 for one step where
/// Python's becomes NaN; a bucket keeps state for the next step only from steps in which all its
/// reduced values were finite; sparse and complex gradients are averaged whole.
///
/// Collective: as every hook. Cost: memory of the gradients with use_error_feedback, and three
/// products of a gradient with a matrix of r columns.
class DDP_API PowerSGD {
 public:
  /// \param group  of the wrapper; none is the default group of the moment.
  /// \throws c10::ValueError  an option out of its range.
  explicit PowerSGD(const PowerSGDOptions& options = {}, const GroupArg& group = {});

  /// For `register_comm_hook`.
  operator CommHook() const;  // NOLINT(google-explicit-constructor): it is one

  /// Uses another group from the next step on, before the wrapper's rebind(), and keeps all state.
  /// Needed only where the constructor got a group.
  void rebind(const GroupArg& group);

  /// The savings of compression so far, on this rank.
  CompressionStats stats() const;

  /// Saves everything but the options and the group. A bucket whose parameters have other sizes
  /// than when it was saved starts with no state.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads what save() wrote.
  void load(torch::serialize::InputArchive& archive);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

/// Makes a PowerSGD that only the hook holds.
DDP_API CommHook power_sgd(const PowerSGDOptions& options = {}, const GroupArg& group = {});

}  // namespace ddp::hooks
