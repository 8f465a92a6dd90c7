#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/elementwise_optimizers.h>

namespace ddp::optim {

/// Options for `LAMB`.
struct DDP_API LAMBOptions : detail::ListedOptions<LAMBOptions> {
  /// Sets the learning rate.
  LAMBOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit
  /// The learning rate. Default: 0.001
  TORCH_ARG(double, lr);
  /// Decays of the averages of gradients and of their squares. Default: 0.9, 0.999
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  /// Added to the denominator. Default: 1e-6
  TORCH_ARG(double, eps) = 1e-6;
  /// The decay of the parameters, within the update whose norm counts. Default: 0.01
  TORCH_ARG(double, weight_decay) = 0.01;
};

/// A parameter's state in `LAMB`.
struct DDP_API LAMBParamState : detail::ListedState<LAMBParamState, LAMBOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The average of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// AdamW whose update of each parameter gets the norm of that parameter: for large batches (You et
/// al., 2020, https://arxiv.org/abs/1904.00962). A parameter or update of norm 0 keeps the update's
/// own norm. Python has none.
///
/// It needs whole parameters: those of replicas, or in a ZeroRedundancyOptimizer, which cuts
/// between parameters for it. A part would get the norm of that part, so step() throws.
class DDP_API LAMB : public detail::BatchedOptimizer<LAMBOptions, LAMBParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

  /// \throws c10::ValueError  also for a part of a parameter, of a fully sharded model or of a
  ///         layer that is cut over ranks; on every rank that has one. Nothing has changed then.
  at::Tensor step(LossClosure closure = nullptr) override;

 protected:
  /// BatchedOptimizer.
  void step_batch(const LAMBOptions& options, const Batch& batch) override;
};

}  // namespace ddp::optim

namespace ddp::detail {

template <>
struct ZeroTypes<optim::LAMB>
    : KnownZeroTypes<optim::LAMBOptions, optim::LAMBParamState, /*need_whole_tensors=*/true> {};

}  // namespace ddp::detail
