#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/ScalarType.h>
#include <ddp/comm_hooks.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

namespace ddp::hooks {

/// Which values of a bucket have a scale in common.
enum class Quantization {
  /// `block` values: a scale, the block's largest magnitude over 127.
  Block,
  /// All of a rank's bucket, as in Python's `quantization_pertensor_hook`: a scale and a zero point
  /// between its least and its largest value.
  Tensor,
  /// `block` values, each with a scale and a zero point, as in Python's
  /// `quantization_perchannel_hook`, whose channels are 512 values of a bucket.
  Channel,
};

/// Options for `Int8Compress`; the same on all ranks.
struct Int8Options {
  /// The values that have a scale in common; at least 1. Smaller blocks lose less, and send more: a
  /// scale has 4 bytes, with `Quantization::Channel` 8.
  TORCH_ARG(int64_t, block) = 256;
  /// Whether what quantization lost is added to the next step's gradient. Costs 4 bytes for each
  /// element of the gradients.
  TORCH_ARG(bool, error_feedback) = true;
  /// Which values have a scale in common.
  TORCH_ARG(Quantization, per) = Quantization::Block;
};

/// Options for `Fp8Compress`; the same on all ranks.
struct Fp8Options {
  /// kFloat8_e4m3fn, with 3 bits after the first one, or kFloat8_e5m2, with 2 and a wider range.
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat8_e4m3fn;
  /// As Int8Options::block. The scale is the block's largest magnitude over the dtype's, 448 or
  /// 57344.
  TORCH_ARG(int64_t, block) = 256;
  /// As Int8Options::error_feedback.
  TORCH_ARG(bool, error_feedback) = true;
};

/// Averages gradients that are sent in one byte each, on any number of ranks. Each rank quantizes
/// its bucket, and sends every other rank the share that this one adds up, in float; the ranks
/// quantize the means again, and gather them. All ranks get the same bits. `Int8Compress` and
/// `Fp8Compress` are such hooks: they differ in the numbers that bytes stand for.
///
/// ```
/// ddp::hooks::Int8Compress int8(ddp::hooks::Int8Options().block(256));
/// model->register_comm_hook(int8);
/// checkpointer.add_per_rank("int8", int8);  // what was lost is each rank's own
/// ```
///
/// Error feedback is of both quantizations: a rank adds what its share of the means lost to its own
/// errors. They are kept only in steps whose means are finite. A gradient that is not finite makes
/// its block NaN on all ranks, with Quantization::Tensor the bucket.
///
/// Gradients are float, half, bfloat16, or double, which becomes float on the way; those of other
/// dtypes are an error. Sparse gradients are averaged whole.
///
/// Use one object for one wrapper. A copy shares its state. Thread safety: none; save between
/// steps.
///
/// Collective: as every hook. The second collective of a bucket starts when the next bucket is
/// ready, so that ranks cannot disagree about the order.
/// Cost: of n ranks, each sends 2 (n - 1) / n bytes for an element of a bucket, and 4 bytes for the
///   scale of a block; on CPUs three passes over the bucket.
class DDP_API ByteCompress {
 public:
  /// For `register_comm_hook`.
  operator CommHook() const;  // NOLINT(google-explicit-constructor): it is one

  /// Uses another group from the next step on, before the wrapper's rebind(), and keeps all state.
  /// Needed only where the constructor got a group.
  void rebind(const GroupArg& group);

  /// Saves the errors. A bucket whose parameters have other sizes than when it was saved starts
  /// with none.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads what save() wrote.
  void load(torch::serialize::InputArchive& archive);

 protected:
  class Impl;
  /// \param impl  of the hook, with its group and its errors.
  explicit ByteCompress(std::shared_ptr<Impl> impl);

 private:
  std::shared_ptr<Impl> impl_;
};

/// A byte has an integer.
///
/// Differences from Python's hooks, which gather all ranks' buckets on all ranks: the means are
/// quantized, too; a scale may be below 1.19e-7; the last block of a rank's share is not padded.
class DDP_API Int8Compress : public ByteCompress {
 public:
  /// \param group  of the wrapper; none is the default group of the moment.
  /// \throws c10::ValueError  an option out of its range.
  explicit Int8Compress(const Int8Options& options = {}, const GroupArg& group = {});
};

/// A byte has a float. The error of a value is at most a 16th of it, with kFloat8_e5m2 an 8th, as
/// long as it is above 2^-14 of its block's largest, with kFloat8_e5m2 2^-29. With integers the
/// error is at most a 254th of that largest, however small the value.
///
/// Bytes are those of LibTorch's conversions, on every device; no collective of a backend adds up
/// fp8. Python has no such hook.
class DDP_API Fp8Compress : public ByteCompress {
 public:
  /// As Int8Compress.
  explicit Fp8Compress(const Fp8Options& options = {}, const GroupArg& group = {});
};

/// Makes an Int8Compress that only the hook holds.
DDP_API CommHook int8_compress(const Int8Options& options = {}, const GroupArg& group = {});
/// Makes an Fp8Compress that only the hook holds.
DDP_API CommHook fp8_compress(const Fp8Options& options = {}, const GroupArg& group = {});

}  // namespace ddp::hooks
