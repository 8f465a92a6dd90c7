#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/detail/fused_step.h>
#include <ddp/detail/zero_types.h>
#include <ddp/elementwise_optimizers.h>
#include <ddp/export.h>
#include <ddp/lamb.h>
#include <ddp/muon.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

/// Includes NAdam, RAdam, Adamax, Adadelta and Lion, LAMB, and Muon; they have headers of their
/// own. Here: optimizers whose step is one kernel for all parameters of a device and dtype, as
/// Python's with `fused=True`.
///
/// They are LibTorch's optimizers with another step(): the same constructors, options, state and
/// files, so that a run may change from one to the other. Parameters agree within the rounding of a
/// step. On a CPU they are Python's to the bit.
///
/// ```
/// ddp::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
/// ```
///
/// Where a `torch::optim::Optimizer` is taken, so are they: by schedules, `step_in_backward`,
/// `GradScaler`, `Checkpointer`, `ZeroRedundancyOptimizer<ddp::optim::AdamW>`. With a GradScaler no
/// step waits for the GPU.
///
/// step() of each throws c10::ValueError, before it changes anything, for a parameter that the
/// kernels do not take: other devices than CPU and CUDA, other dtypes than float, double, half and
/// bfloat16, memory with gaps, a sparse gradient, and a gradient of another dtype or device.
///
/// Cost: a step reads and writes each parameter, gradient and state once.
/// Source: torch.optim, torch 2.11.0, `_fused_adam` and the others.
namespace ddp::optim {

using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

/// torch::optim::AdamW in one kernel.
class DDP_API AdamW : public detail::FusedStep<torch::optim::AdamW> {
 public:
  using FusedStep::FusedStep;
  /// FusedOptimizer.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
};

/// torch::optim::Adam in one kernel.
class DDP_API Adam : public detail::FusedStep<torch::optim::Adam> {
 public:
  using FusedStep::FusedStep;
  /// FusedOptimizer.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
};

/// torch::optim::Adagrad in one kernel.
class DDP_API Adagrad : public detail::FusedStep<torch::optim::Adagrad> {
 public:
  using FusedStep::FusedStep;
  /// FusedOptimizer.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
};

/// torch::optim::SGD in one kernel.
class DDP_API SGD : public detail::FusedStep<torch::optim::SGD> {
 public:
  using FusedStep::FusedStep;

  /// False where a group has momentum and dampening: the first step that is not skipped does not
  /// dampen, and only the host could tell which that is.
  bool takes_found_inf() const override;
  /// FusedOptimizer.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
};

}  // namespace ddp::optim

namespace ddp::detail {

template <>
struct ZeroTypes<optim::Adagrad> : ZeroTypes<torch::optim::Adagrad> {};
template <>
struct ZeroTypes<optim::Adam> : ZeroTypes<torch::optim::Adam> {};
template <>
struct ZeroTypes<optim::AdamW> : ZeroTypes<torch::optim::AdamW> {};
template <>
struct ZeroTypes<optim::SGD> : ZeroTypes<torch::optim::SGD> {};

}  // namespace ddp::detail
