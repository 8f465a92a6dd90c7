#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace ddp {

/// The gradients that one collective reduces, as a communication hook gets them.
///
/// Sizes: `buffer()` is 1-D and holds the undivided gradients of `parameters()` one after another;
/// `gradients()` are views into it in the parameters' shapes. For a sparse gradient `buffer()` is
/// that gradient itself.
class DDP_API GradBucket {
 public:
  /// Called by the reducer; a hook gets the bucket.
  GradBucket(
      size_t index, bool is_last, at::Tensor buffer, std::vector<at::Tensor> gradients,
      std::vector<at::Tensor> parameters)
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)) {}

  /// Place in launch order, from 0. Buckets change once, when they are rebuilt in the order in
  /// which gradients became ready: state kept per bucket holds from the second iteration on, with
  /// static_graph from the third.
  size_t index() const { return index_; }
  /// Whether this is the last bucket of the backward pass.
  bool is_last() const { return is_last_; }

  /// The gradients one after another, undivided.
  const at::Tensor& buffer() const { return buffer_; }
  /// Replaces the buffer by another tensor; `gradients()` stay views of the first.
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }

  /// One per parameter, views into the bucket's own storage.
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  /// The parameters of the gradients, in the order of `gradients()`.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
};

/// Reduces one bucket in its own way, without waiting: returns a future of the tensor, of
/// `buffer()`'s shape and dtype, that the gradients become. The hook also divides: the buffer holds
/// this rank's own gradients, undivided.
///
/// Collective: the reducer calls the hook with buckets in the same order on every rank, and the
/// hook must communicate the same way on each. Called from the autograd thread that made the last
/// gradient of the bucket.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)>;

/// Hooks for register_comm_hook. One that is made without a group uses the default group of the
/// moment, so it follows a wrapper's rebind() to a new default group.
namespace hooks {

/// Averages the bucket: divides by the world size, then all-reduces, as without a hook.
DDP_API CommHook all_reduce(const GroupArg& group = {});

/// Averages in half precision, halving the bytes on the wire: casts, divides, all-reduces and
/// casts back. Gradients beyond 65504 in magnitude become infinite on the way.
DDP_API CommHook fp16_compress(const GroupArg& group = {});

/// As fp16_compress in bfloat16: float's range, 8 bits of precision. On CPU too.
DDP_API CommHook bf16_compress(const GroupArg& group = {});

/// Passes the bucket to `hook` in half precision, and casts the result back: the hook then sends
/// half as many bytes. Around fp16_compress it has no effect.
///
/// \throws c10::ValueError  an empty function.
DDP_API CommHook fp16_compress_wrapper(CommHook hook);

/// As fp16_compress_wrapper in bfloat16.
DDP_API CommHook bf16_compress_wrapper(CommHook hook);

/// Leaves every rank its own gradients: to measure a step without communication, or to average
/// parameters instead.
DDP_API CommHook noop();

}  // namespace hooks
}  // namespace ddp
