#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/export.h>
#include <ddp/lr_scheduler.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// \file
/// Schedules that begin again and again. See lr_scheduler.h for what holds of all schedules.

/// Options for `CosineAnnealingWarmRestarts`.
struct CosineAnnealingWarmRestartsOptions {
  CosineAnnealingWarmRestartsOptions() = default;
  /// This T_0, and the defaults of all other options.
  CosineAnnealingWarmRestartsOptions(int64_t T_0) : T_0_(T_0) {}

  /// Epochs until the first restart, >= 1. Must be set.
  TORCH_ARG(int64_t, T_0) = 0;
  /// How many times longer each period is than the one before, >= 1. Default: 1
  TORCH_ARG(int64_t, T_mult) = 1;
  /// The least rate. Default: 0
  TORCH_ARG(double, eta_min) = 0;
};

/// Half a cosine from the initial rate to `eta_min`, again and again (Loshchilov and Hutter,
/// arXiv:1608.03983).
class DDP_API CosineAnnealingWarmRestarts final : public LRScheduler {
 public:
  /// \throws c10::ValueError  T_0 or T_mult below 1.
  CosineAnnealingWarmRestarts(
      torch::optim::Optimizer& optimizer, const CosineAnnealingWarmRestartsOptions& options);

  using torch::optim::LRScheduler::step;
  /// Goes to an epoch, which may be a fraction: `step(epoch + double(batch) / batches)` after each
  /// batch.
  ///
  /// \throws c10::ValueError  below 0, or not finite.
  void step(double epoch);

  /// Saves also where it is in its period.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  void go_to(double epoch);

  CosineAnnealingWarmRestartsOptions options_;
  double T_cur_ = 0;  // epochs since the last restart
  double T_i_ = 0;    // epochs of this period
  std::optional<double> asked_;
};

/// Options for `CyclicLR`.
struct CyclicLROptions {
  CyclicLROptions() = default;
  /// The options that must be set; the others have defaults.
  CyclicLROptions(PerGroup base_lr, PerGroup max_lr)
      : base_lr_(std::move(base_lr)), max_lr_(std::move(max_lr)) {}

  /// The lowest rate, for all parameter groups or for each. Must be set.
  TORCH_ARG(PerGroup, base_lr) = std::vector<double>();
  /// The highest rate of a cycle that is not scaled. Must be set.
  TORCH_ARG(PerGroup, max_lr) = std::vector<double>();
  /// Steps in which the rate rises, >= 1. Default: 2000
  TORCH_ARG(int64_t, step_size_up) = 2000;
  /// Steps in which it falls, >= 0. Default: step_size_up
  TORCH_ARG(std::optional<int64_t>, step_size_down) = {};
  /// "triangular"; "triangular2": each cycle is half as high as the one before; "exp_range": the
  /// height is scaled by gamma^step. Default: "triangular"
  TORCH_ARG(std::string, mode) = "triangular";
  /// The base of "exp_range". Default: 1
  TORCH_ARG(double, gamma) = 1.0;
  /// Scales the height, in place of mode; not saved. Default: none
  TORCH_ARG(std::function<double(double)>, scale_fn) = {};
  /// The argument of scale_fn: "cycle", its number from 1, or "iterations", the step.
  /// Default: "cycle"
  TORCH_ARG(std::string, scale_mode) = "cycle";
  /// Whether momentum (SGD, RMSprop) or beta1 (Adam, AdamW) moves against the rate. Default: true
  TORCH_ARG(bool, cycle_momentum) = true;
  /// Momentum where the rate is highest. Default: 0.8
  TORCH_ARG(PerGroup, base_momentum) = 0.8;
  /// Momentum where the rate is lowest. Default: 0.9
  TORCH_ARG(PerGroup, max_momentum) = 0.9;
};

/// Moves the rate up and down between two bounds (Smith, arXiv:1506.01186). Step it once a batch.
class DDP_API CyclicLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  an option is out of its range, or cycle_momentum is set and the
  ///         optimizer has no momentum.
  CyclicLR(torch::optim::Optimizer& optimizer, CyclicLROptions options);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  bool has_own_base_lrs() const override { return true; }
  void check_options() const;
  double height(double cycle, int64_t epoch) const;

  CyclicLROptions options_;
};

}  // namespace ddp
