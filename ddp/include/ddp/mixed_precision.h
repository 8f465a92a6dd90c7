#pragma once

#include <optional>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

namespace ddp {

/// The dtypes in which a wrapped model computes and communicates; an option of
/// `DistributedDataParallel`.
///
/// In forward the module's floating parameters are copies in `param_dtype`, through which gradients
/// flow back to the parameters themselves. Those keep their dtype: the optimizer steps float32 (the
/// master weights) with float32 gradients. Between passes, in files and after an exception
/// parameters are never in low precision.
///
/// Example:
/// ```
/// ddp::DistributedDataParallel model(
///     net, ddp::DistributedDataParallelOptions().mixed_precision(
///              ddp::MixedPrecision().param_dtype(torch::kBFloat16)));
/// ```
/// Every rank sets the same options. Half has a narrow range: use a `GradScaler` with it.
///
/// Memory: a copy of the parameters in `param_dtype`, as long as the outputs of forward exist.
/// Cost: a forward pass reads every parameter once more, and writes half as many bytes.
/// Source: torch.nn.parallel.distributed._MixedPrecision, torch 2.11.0. Differences: parameters are
///   in low precision only while a pass uses them, and gradients accumulate in float32.
struct MixedPrecision {
  /// The dtype of parameters in forward, and of forward's floating tensor arguments, which are cast
  /// as device_ids moves them. Default: unset, parameters and arguments keep their dtype
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = {};
  /// The dtype in which gradients are averaged. Half or BFloat16 send half the bytes, as
  /// `hooks::bf16_compress` does; this replaces a communication hook. Float: gradients keep their
  /// dtype. Default: unset, `param_dtype`
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = {};
  /// The dtype to which the module's floating buffers are converted, permanently, when it is
  /// wrapped. Default: unset, buffers keep their dtype
  TORCH_ARG(std::optional<at::ScalarType>, buffer_dtype) = {};
};

}  // namespace ddp
