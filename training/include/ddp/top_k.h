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
  /// The share of a bucket's elements that travel; at least one element does.
  TORCH_ARG(double, ratio) = 0.01;
  /// Whether what stays behind is added to the next step's gradient. Without it, small gradients
  /// never travel. Costs the memory of all gradients.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Steps, from 0, that are averaged as without a hook.
  TORCH_ARG(int64_t, start_iter) = 0;
};

/// Averages the largest elements of every bucket, by magnitude, and leaves the others 0 (Lin et
/// al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887, without its changes to
/// the optimizer). Every rank chooses its own elements.
///
/// ```
/// ddp::hooks::TopK top_k(ddp::hooks::TopKOptions().ratio(0.01));
/// model->register_comm_hook(top_k);
/// checkpointer.add_per_rank("top_k", top_k);  // what stayed behind is each rank's own
/// ```
///
/// One object for one wrapper. A copy shares its state. Thread safety: none; save between steps.
/// Sparse and complex gradients are averaged whole. What stayed behind in a step in which what
/// travelled was not finite, on any rank, is forgotten, and what stayed before is kept.
///
/// Collective: as every hook. Cost: a rank receives, of every other rank, an index of 4 bytes and a
///   value for each element that travels; a selection among all elements of the bucket.
class DDP_API TopK {
 public:
  /// \param group  of the wrapper; none is the default group.
  /// \throws c10::ValueError  an option out of its range.
  explicit TopK(const TopKOptions& options = {}, const ProcessGroup& group = {});

  /// For `register_comm_hook`.
  operator CommHook() const;  // NOLINT(google-explicit-constructor): it is one

  /// What stayed behind, and the count of steps. A bucket whose parameters have other sizes than
  /// when it was saved starts anew.
  void save(torch::serialize::OutputArchive& archive) const;
  /// What save() wrote.
  void load(torch::serialize::InputArchive& archive);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

/// A TopK that nobody else holds.
DDP_API CommHook top_k(const TopKOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp::hooks
