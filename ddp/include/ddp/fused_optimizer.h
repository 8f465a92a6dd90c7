#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// What the optimizers of `<ddp/optim.h>` can do beside LibTorch's: their kernels read the count of
/// steps, the scale of gradients and whether to skip from the parameters' device, so that no step
/// waits for a GPU.
class DDP_API FusedOptimizer {
 public:
  FusedOptimizer() = default;
  C10_DISABLE_COPY_AND_ASSIGN(FusedOptimizer);
  virtual ~FusedOptimizer();

  /// Whether step_scaled() may be used.
  virtual bool takes_found_inf() const { return true; }

  /// Steps on gradients that are multiplied by `grad_scale`, and leaves them divided by it. Where
  /// `found_inf` is not 0 it changes no parameter, moment or count. A `GradScaler` calls it.
  ///
  /// \param grad_scale  shape [], float32; undefined: gradients are as they are.
  /// \param found_inf  shape [], float32, 0 or 1; undefined: 0.
  /// \throws as step().
  virtual void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

  /// Writes the counts of steps from the devices into the optimizer's state(). Needed before a
  /// program reads the count of a parameter on a GPU there, after steps that a GPU may have skipped
  /// or a captured graph has repeated; saving does it. Blocks: host.
  virtual void sync_step_counts() const = 0;

  /// Takes the counts of state() for the next step. Needed after a program itself has put other
  /// states there; loading does it.
  virtual void reset_step_counts() = 0;

  /// Makes the steps until end_capture() read the learning rates from the parameters' devices, as
  /// float32, instead of holding them as numbers: a graph that captures such a step takes the rates
  /// that refresh_numbers() wrote last. A `CapturedStep` calls the three.
  virtual void begin_capture() = 0;
  /// Undoes begin_capture().
  virtual void end_capture() noexcept = 0;

  /// Writes the rates of the groups' options to the devices, in stream order, for replays of what
  /// was captured; after reset_step_counts() the counts, too. Cost: nothing for what has not
  /// changed.
  virtual void refresh_numbers() = 0;
};

/// FusedOptimizer::sync_step_counts() where the optimizer has it.
DDP_API void sync_step_counts(const torch::optim::Optimizer& optimizer);
/// FusedOptimizer::reset_step_counts() where the optimizer has it.
DDP_API void reset_step_counts(torch::optim::Optimizer& optimizer);

}  // namespace ddp
