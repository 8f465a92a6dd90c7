#pragma once

#include <ddp/export.h>

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `AutocastGuard`; a dtype alone converts to them.
struct AutocastOptions {
  AutocastOptions() = default;
  /// This dtype, and the defaults of all other options.
  /* implicit */ AutocastOptions(at::ScalarType dtype) : dtype_(dtype) {}

  /// The dtype of matrix products and convolutions: kBFloat16 or kHalf. Default: LibTorch's,
  /// bfloat16 on CPUs and half on CUDA.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = {};
  /// False disables autocast for a part of a region.
  TORCH_ARG(bool, enabled) = true;
  /// Whether a parameter is cast once a region, instead of at each use. Default: the present
  /// setting.
  TORCH_ARG(std::optional<bool>, cache_enabled) = {};
};

/// Mixed precision for the operations of this scope, on tensors of one kind of device: matrix
/// products and convolutions run in 16 bits, operations that need the range stay in float32.
/// Parameters and their gradients keep their dtype. As Python's `torch.autocast`.
///
/// ```
/// at::Tensor loss;
/// {
///   const ddp::AutocastGuard autocast(torch::kCPU);
///   loss = cross_entropy(model->forward(x), y);
/// }
/// loss.backward();  // outside: the backward of each operation has its forward's dtype
/// ```
///
/// Guards nest. The outermost guard clears the cache of cast parameters at its end, so that the
/// next region sees the optimizer's changes. A guard restores the previous state at its end, also
/// after an exception.
///
/// Thread safety: autocast is a state of the thread; destroy the guard on the thread that made it,
/// in the reverse order. Cost: under a microsecond, and the casts.
class [[nodiscard]] DDP_API AutocastGuard {
 public:
  /// \throws c10::ValueError  another dtype, or a device that has no autocast.
  explicit AutocastGuard(c10::DeviceType device, const AutocastOptions& options = {});
  ~AutocastGuard();
  C10_DISABLE_COPY_AND_ASSIGN(AutocastGuard);

 private:
  const c10::DeviceType device_;
  const bool was_enabled_;
  const at::ScalarType dtype_before_;
  const bool cache_was_enabled_;
};

}  // namespace ddp
