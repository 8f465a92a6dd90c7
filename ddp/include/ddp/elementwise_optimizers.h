#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ddp/detail/listed_optimizer.h>
#include <ddp/detail/zero_types.h>
#include <ddp/export.h>
#include <torch/arg.h>

/// Optimizers that Python has and LibTorch has not, and Lion. They update each element on its own.
///
/// ```
/// ddp::optim::NAdam optimizer(model->parameters(), ddp::optim::NAdamOptions(2e-3));
/// ```
///
/// Names and defaults of options are Python's, and so are the bits of a step on a CPU. Where a
/// `torch::optim::Optimizer` is taken, so are they; files of `state_dict()` are Python's.
///
/// Cost: about ten passes over each parameter and its state; not one kernel as
/// `ddp::optim::AdamW`.
/// Source: torch.optim, torch 2.11.0.
namespace ddp::optim {

/// Coefficients of two running averages.
using Betas = std::tuple<double, double>;

/// Options for `NAdam`.
struct DDP_API NAdamOptions : detail::ListedOptions<NAdamOptions> {
  /// Sets the learning rate.
  NAdamOptions(double lr = 2e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  /// The learning rate. Default: 0.002
  TORCH_ARG(double, lr);
  /// Decays of the averages of gradients and of their squares. Default: 0.9, 0.999
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  /// Added to the denominator. Default: 1e-8
  TORCH_ARG(double, eps) = 1e-8;
  /// Default: 0
  TORCH_ARG(double, weight_decay) = 0;
  /// How fast the momentum rises to beta1. Default: 0.004
  TORCH_ARG(double, momentum_decay) = 4e-3;
  /// Decay the parameters as AdamW, not the gradients as Adam. Default: false
  TORCH_ARG(bool, decoupled_weight_decay) = false;
};

/// A parameter's state in `NAdam`.
struct DDP_API NAdamParamState : detail::ListedState<NAdamParamState, NAdamOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The product of the momenta of all steps; a value of float32, as in Python.
  TORCH_ARG(double, mu_product) = 1;
  /// The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The average of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// Adam with Nesterov momentum (Dozat, 2016).
class DDP_API NAdam : public detail::BatchedOptimizer<NAdamOptions, NAdamParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

 protected:
  /// BatchedOptimizer.
  void step_batch(const NAdamOptions& options, const Batch& batch) override;
};

/// Options for `RAdam`.
struct DDP_API RAdamOptions : detail::ListedOptions<RAdamOptions> {
  /// Sets the learning rate.
  RAdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit
  /// The learning rate. Default: 0.001
  TORCH_ARG(double, lr);
  /// As NAdamOptions'. Default: 0.9, 0.999
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  /// Added to the denominator. Default: 1e-8
  TORCH_ARG(double, eps) = 1e-8;
  /// Default: 0
  TORCH_ARG(double, weight_decay) = 0;
  /// Decay the parameters as AdamW, not the gradients as Adam. Default: false
  TORCH_ARG(bool, decoupled_weight_decay) = false;
};

/// A parameter's state in `RAdam`.
struct DDP_API RAdamParamState : detail::ListedState<RAdamParamState, RAdamOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The average of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// Adam that leaves the denominator out while its variance is large (Liu et al., 2019,
/// https://arxiv.org/abs/1908.03265).
class DDP_API RAdam : public detail::BatchedOptimizer<RAdamOptions, RAdamParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

 protected:
  /// BatchedOptimizer.
  void step_batch(const RAdamOptions& options, const Batch& batch) override;
};

/// Options for `Adamax`.
struct DDP_API AdamaxOptions : detail::ListedOptions<AdamaxOptions> {
  /// Sets the learning rate.
  AdamaxOptions(double lr = 2e-3) : lr_(lr) {}  // NOLINT: implicit
  /// The learning rate. Default: 0.002
  TORCH_ARG(double, lr);
  /// Decays of the average of gradients, and of the largest one. Default: 0.9, 0.999
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  /// Added to magnitudes of gradients. Default: 1e-8
  TORCH_ARG(double, eps) = 1e-8;
  /// Default: 0
  TORCH_ARG(double, weight_decay) = 0;
};

/// A parameter's state in `Adamax`.
struct DDP_API AdamaxParamState : detail::ListedState<AdamaxParamState, AdamaxOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The decaying largest magnitude of gradients.
  TORCH_ARG(at::Tensor, exp_inf);
};

/// Adam with the infinity norm (Kingma and Ba, 2014, https://arxiv.org/abs/1412.6980).
class DDP_API Adamax : public detail::BatchedOptimizer<AdamaxOptions, AdamaxParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

 protected:
  /// BatchedOptimizer.
  void step_batch(const AdamaxOptions& options, const Batch& batch) override;
};

/// Options for `Adadelta`.
struct DDP_API AdadeltaOptions : detail::ListedOptions<AdadeltaOptions> {
  /// Sets the learning rate.
  AdadeltaOptions(double lr = 1) : lr_(lr) {}  // NOLINT: implicit
  /// A factor of each update. Default: 1
  TORCH_ARG(double, lr);
  /// The decay of the average of squared gradients. Default: 0.9
  TORCH_ARG(double, rho) = 0.9;
  /// Added to averages before their root. Default: 1e-6
  TORCH_ARG(double, eps) = 1e-6;
  /// Default: 0
  TORCH_ARG(double, weight_decay) = 0;
};

/// A parameter's state in `Adadelta`.
struct DDP_API AdadeltaParamState : detail::ListedState<AdadeltaParamState, AdadeltaOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The average of squared gradients.
  TORCH_ARG(at::Tensor, square_avg);
  /// The average of squared updates.
  TORCH_ARG(at::Tensor, acc_delta);
};

/// Rates from the averages of past updates (Zeiler, 2012, https://arxiv.org/abs/1212.5701).
class DDP_API Adadelta : public detail::BatchedOptimizer<AdadeltaOptions, AdadeltaParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

 protected:
  /// BatchedOptimizer.
  void step_batch(const AdadeltaOptions& options, const Batch& batch) override;
};

/// Options for `Lion`.
struct DDP_API LionOptions : detail::ListedOptions<LionOptions> {
  /// Sets the learning rate.
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT: implicit
  /// The learning rate; a third to a tenth of AdamW's. Default: 0.0001
  TORCH_ARG(double, lr);
  /// Decays of the update's average of gradients, and of the average that is kept. Default: 0.9,
  /// 0.99
  TORCH_ARG(Betas, betas) = {0.9, 0.99};
  /// The decay of the parameters, as AdamW's. Default: 0
  TORCH_ARG(double, weight_decay) = 0;
};

/// A parameter's state in `Lion`.
struct DDP_API LionParamState : detail::ListedState<LionParamState, LionOptions> {
  /// Steps that it has had.
  TORCH_ARG(int64_t, step) = 0;
  /// The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
};

/// Steps by the sign of an average of gradients: half of AdamW's state (Chen et al., 2023,
/// https://arxiv.org/abs/2302.06675). Python has none.
class DDP_API Lion : public detail::BatchedOptimizer<LionOptions, LionParamState> {
 public:
  using BatchedOptimizer::BatchedOptimizer;

 protected:
  /// BatchedOptimizer.
  void step_batch(const LionOptions& options, const Batch& batch) override;
};

}  // namespace ddp::optim

namespace ddp::detail {

template <>
struct ZeroTypes<optim::NAdam> : KnownZeroTypes<optim::NAdamOptions, optim::NAdamParamState> {};
template <>
struct ZeroTypes<optim::RAdam> : KnownZeroTypes<optim::RAdamOptions, optim::RAdamParamState> {};
template <>
struct ZeroTypes<optim::Adamax> : KnownZeroTypes<optim::AdamaxOptions, optim::AdamaxParamState> {};
template <>
struct ZeroTypes<optim::Adadelta>
    : KnownZeroTypes<optim::AdadeltaOptions, optim::AdadeltaParamState> {};
template <>
struct ZeroTypes<optim::Lion> : KnownZeroTypes<optim::LionOptions, optim::LionParamState> {};

}  // namespace ddp::detail
