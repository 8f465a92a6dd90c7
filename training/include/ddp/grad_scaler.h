#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// Options for `GradScaler`.
struct GradScalerOptions {
  /// The initial factor of the loss.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// The scale grows by this factor, above 1, after growth_interval steps in a row without
  /// infinities.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// The scale shrinks by this factor, between 0 and 1, after a skipped step.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Steps between two growths, at least 1.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// False: scale() returns its argument, step() steps, all other calls do nothing.
  TORCH_ARG(bool, enabled) = true;
  /// Groups whose ranks skip a step together, as soon as one of them has found an infinity. Under
  /// DistributedDataParallel none is needed: an average with an infinity is infinite on every rank.
  /// Name the groups over which gradients are divided, or whose ranks have parameters of their own,
  /// as those of layers that are cut (ColumnParallelLinear) and of a FullyShardedDataParallel;
  /// the group of a ZeroRedundancyOptimizer is included anyway.
  TORCH_ARG(std::vector<ProcessGroup>, found_inf_groups) = {};
};

/// Whether GradScaler::step() took the step: converts to bool.
class DDP_API StepOutcome {
 public:
  /// Use GradScaler::step().
  explicit StepOutcome(at::Tensor found_inf) : found_inf_(std::move(found_inf)) {}

  /// Cost: after a fused optimizer's step on a GPU, it waits for the GPU.
  operator bool() const;  // NOLINT(google-explicit-constructor): `bool taken = scaler.step(...)`

 private:
  at::Tensor found_inf_;  // shape [], not 0 where the step was skipped; undefined: taken
};

/// Scales the loss so that gradients in half precision do not vanish, skips steps whose gradients
/// overflowed, and adapts the scale. The same scales and skipped steps as Python's
/// `torch.amp.GradScaler`. bfloat16 has the range of float32 and needs no scaler.
///
/// ```
/// ddp::GradScaler scaler;
/// scaler.scale(loss).backward();  // the wrapper averages scaled gradients
/// scaler.unscale_(optimizer);     // only where gradients are looked at before the step
/// torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
/// scaler.step(optimizer);
/// scaler.update();                // once a step, after all optimizers
/// ```
///
/// With stage 2 of a ZeroRedundancyOptimizer, a skipped step clears the gradients.
/// step_in_backward() and a ZeroRedundancyOptimizer's overlap step before infinities can be found,
/// and exclude a scaler.
///
/// Collective over found_inf_groups, if there are any: unscale_(), or step() where unscale_() was
/// not called.
/// With the optimizers of `<ddp/optim.h>` and without found_inf_groups the device decides about a
/// step, and the host does not wait: the scale is there as well, so that get_scale() waits. For
/// ddp::optim::SGD with momentum and dampening, the host decides.
///
/// Thread safety: none. A Checkpointer saves it.
/// Cost: one pass over the gradients, and one wait for the device in step() where the host decides.
class DDP_API GradScaler {
 public:
  /// \throws c10::ValueError  an option out of its range.
  explicit GradScaler(const GradScalerOptions& options = {});
  /// A copy has a scale of its own.
  GradScaler(const GradScaler& other);
  /// Copies the scale, too.
  GradScaler& operator=(const GradScaler& other);

  /// Returns `loss` times the scale.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Returns each of them times the scale.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses) const;

  /// Divides the optimizer's gradients by the scale, and checks them for infinities and NaN.
  ///
  /// \throws c10::Error  a second time since update(), after step(), or where no parameter has a
  ///         gradient. c10::ValueError  gradients in half precision: parameters must stay float32.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls `optimizer.step()`, unless its gradients have infinities or NaN. Unscales them first, if
  /// unscale_() has not.
  ///
  /// \return whether it did: false if the step was skipped.
  /// \throws c10::Error  a second time since update(). c10::ValueError  an LBFGS, which computes
  ///         gradients within its step. Else as unscale_().
  StepOutcome step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to the infinities found since the last call, or sets it to `new_scale`.
  ///
  /// \throws c10::Error  nothing was unscaled since the last call.
  ///         c10::ValueError  `new_scale` is not above 0, or not finite.
  void update(std::optional<double> new_scale = std::nullopt);

  /// The scale; 1 if not enabled.
  double get_scale() const;
  /// Whether scaling is enabled.
  bool enabled() const { return options_.enabled(); }

  /// Saves the scale, the factors and the count. Call save() and load() between update() and the
  /// next step.
  void save(torch::serialize::OutputArchive& archive) const;
  /// The saved scale, factors and interval replace the options. Nothing happens if not enabled.
  ///
  /// \throws c10::ValueError  saved by one that was not enabled.
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage { Unscaled, Stepped };
  struct Progress {
    Stage stage;
    at::Tensor found_inf;  // shape [], float32; on a CPU where the host decides
  };

  bool host_decides(const torch::optim::Optimizer& optimizer) const;
  at::Tensor agreed(torch::optim::Optimizer& optimizer) const;
  StepOutcome step_on_device(torch::optim::Optimizer& optimizer);

  GradScalerOptions options_;
  // On the device that decides, from its first decision on. float32, as in Python: the scale keeps
  // its value where it would overflow. Shapes []; dtypes float32 and int32.
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::map<const torch::optim::Optimizer*, Progress> progress_;  // since update()
};

}  // namespace ddp
