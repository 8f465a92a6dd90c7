#pragma once

#include <cstdint>
#include <map>
#include <optional>
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
/// Thread safety: none. A Checkpointer saves it.
/// Cost: one pass over the gradients, and one wait for the device in step().
class DDP_API GradScaler {
 public:
  /// \throws c10::ValueError  an option out of its range.
  explicit GradScaler(const GradScalerOptions& options = {});

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
  /// \return false if the step was skipped.
  /// \throws c10::Error  a second time since update(). c10::ValueError  an LBFGS, which computes
  ///         gradients within its step. Else as unscale_().
  bool step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to the infinities found since the last call, or sets it to `new_scale`.
  ///
  /// \throws c10::Error  nothing was unscaled since the last call.
  ///         c10::ValueError  `new_scale` is not above 0, or not finite.
  void update(std::optional<double> new_scale = std::nullopt);

  /// The scale; 1 if not enabled.
  double get_scale() const { return enabled() ? scale_ : 1.0; }
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
    bool found_inf;
  };

  bool unscale_gradients(torch::optim::Optimizer& optimizer) const;

  GradScalerOptions options_;
  float scale_;  // float32, as in Python: it keeps its value where it would overflow
  int64_t growth_tracker_ = 0;
  std::map<const torch::optim::Optimizer*, Progress> progress_;  // since update()
};

}  // namespace ddp
