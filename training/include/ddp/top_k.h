#pragma once

#include <cstdint>
#include <memory>

#include <ddp/comm_hooks.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

namespace ddp::hooks {

/// Options for `TopK`; the same on all ranks.
struct TopKOptions {
  /// The share of a bucket's elements that is sent; at least one element is.
  TORCH_ARG(double, ratio) = 0.01;
  /// Whether elements that were not sent are added to the next step's gradient. Without it, small
  /// gradients are never sent. Costs the memory of all gradients.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// The number of first steps that average as without a hook.
  TORCH_ARG(int64_t, start_iter) = 0;
};

/// Averages the largest elements of every bucket, by magnitude, and leaves the others 0 (Lin et
/// al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887, without its changes to
/// the optimizer). Every rank chooses its own elements.
///
/// ```
/// ddp::hooks::TopK top_k(ddp::hooks::TopKOptions().ratio(0.01));
/// model->register_comm_hook(top_k);
/// checkpointer.add_per_rank("top_k", top_k);  // the elements not sent are each rank's own
/// ```
///
/// Use one object for one wrapper. A copy shares its state. Thread safety: none; save between
/// steps. Sparse and complex gradients are averaged whole. Where a sent value is not finite on any
/// rank, the unsent elements of that step are dropped, and those of earlier steps are kept.
///
/// Cost: a rank receives, from every other rank, an index of 4 bytes and a value for each element
///   sent; a selection among all elements of the bucket.
class DDP_API TopK {
 public:
  /// \param group  of the wrapper; none is the default group of the moment.
  /// \throws c10::ValueError  an option out of its range.
  explicit TopK(const TopKOptions& options = {}, const GroupArg& group = {});

  /// For `register_comm_hook`.
  operator CommHook() const;  // NOLINT(google-explicit-constructor): it is one

  /// Uses another group from the next step on, before the wrapper's rebind(), and keeps all state.
  /// Needed only where the constructor got a group.
  void rebind(const GroupArg& group);

  /// Saves the elements not sent, and the count of steps. A bucket whose parameters have other
  /// sizes than when it was saved starts with no state.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads what save() wrote.
  void load(torch::serialize::InputArchive& archive);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

/// Makes a TopK that only the hook holds.
DDP_API CommHook top_k(const TopKOptions& options = {}, const GroupArg& group = {});

}  // namespace ddp::hooks
