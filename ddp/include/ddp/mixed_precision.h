#pragma once

#include <optional>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

namespace ddp {

/// What a wrapped model computes and communicates in; as an option of `DistributedDataParallel`.
///
/// In forward the module's floating parameters are copies in `param_dtype`, from which autograd
/// leads back to the parameters themselves. Those stay what they are: the optimizer steps float32
/// (the master weights), with float32 gradients, and between passes, in files and after an
/// exception nobody meets a parameter in low precision.
///
/// Example:
/// ```
/// ddp::DistributedDataParallel model(
///     net, ddp::DistributedDataParallelOptions().mixed_precision(
///              ddp::MixedPrecision().param_dtype(torch::kBFloat16)));
/// ```
/// Every rank sets the same. Half has a narrow range: use a `GradScaler` with it.
///
/// Memory: a copy of the parameters in `param_dtype`, as long as what forward returned.
/// Cost: a forward pass reads every parameter once more, and writes half as many bytes.
/// Source: torch.nn.parallel.distributed._MixedPrecision, torch 2.11.0. Different from there:
///   parameters are in low precision only while a pass uses them, and gradients accumulate in
///   float32.
struct MixedPrecision {
  /// The dtype of parameters in forward, and of forward's floating tensor arguments, which are cast
  /// as device_ids moves them. Default: unset, parameters and arguments as they are
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = {};
  /// The dtype in which gradients are averaged. Half or BFloat16 send half the bytes, as
  /// `hooks::bf16_compress` does, which takes the place of a communication hook; Float leaves
  /// gradients as they are. Default: unset, `param_dtype`
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = {};
  /// The dtype that the module's floating buffers get for good when it is wrapped. Default: unset,
  /// buffers as they are
  TORCH_ARG(std::optional<at::ScalarType>, buffer_dtype) = {};
};

}  // namespace ddp
