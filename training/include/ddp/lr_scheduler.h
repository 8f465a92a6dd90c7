#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// \file
/// Python's learning-rate schedules (torch.optim.lr_scheduler), to the last digit; lr_cycles.h has
/// CosineAnnealingWarmRestarts and CyclicLR. LibTorch itself has StepLR and
/// ReduceLROnPlateauScheduler.
///
/// - As in Python a constructor takes the schedule's first step: it sets the rates of epoch 0.
///   LibTorch's own schedulers do not, and so are one step() late.
/// - Call `step()` after `optimizer.step()`, once an epoch or once a batch: an "epoch" here is a
///   call of step().
/// - The rates that the optimizer has when a schedule is constructed are its initial ones.
///   Construct it on a fresh optimizer, and load checkpoints after that.
/// - Two schedules on one optimizer, both stepped, multiply as in Python; but LambdaLR, OneCycleLR,
///   CyclicLR and CosineAnnealingWarmRestarts set rates. ChainedScheduler steps several at once.
///
/// No call communicates: every rank steps its own schedule, and gets the same rates.
/// Thread safety: none. Ownership: the optimizer must outlive its schedules.

/// The part that schedules share: Python's counting, and save() and load() for a Checkpointer.
class DDP_API LRScheduler : public torch::optim::LRScheduler {
 public:
  /// The number of calls of step() so far.
  int64_t last_epoch() const { return static_cast<int64_t>(step_count_) - 1; }
  /// The rates that are set now, one a parameter group.
  std::vector<double> get_last_lr() const { return get_current_lrs(); }

  /// Saves the count and the initial rates; the optimizer saves the present rates.
  virtual void save(torch::serialize::OutputArchive& archive) const;
  /// \throws c10::ValueError  saved with another number of parameter groups; nothing changes then.
  virtual void load(torch::serialize::InputArchive& archive);

 protected:
  /// \param name  the class, for error texts.
  LRScheduler(torch::optim::Optimizer& optimizer, const char* name);

  /// Computes the rates at an epoch from the present rates.
  virtual std::vector<double> next_lrs(int64_t epoch) = 0;
  /// Whether the schedule has initial rates of its own.
  virtual bool has_own_base_lrs() const { return false; }
  /// Whether its initial rates become those of the schedules that are constructed after it.
  virtual bool sets_initial_lrs() const { return false; }
  /// The rates at epoch 0 of a schedule that follows another one.
  virtual std::vector<double> first_lrs_in_sequence() { return next_lrs(0); }
  /// The schedules that it steps.
  virtual std::vector<LRScheduler*> parts() const { return {}; }

  /// The optimizer whose rates it sets.
  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  /// The class, for error texts.
  const char* name() const { return name_; }
  /// The rates when the schedule began, by parameter group.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  /// For schedules that have values by group.
  ///
  /// \throws c10::ValueError  the optimizer has another number of parameter groups than at the
  ///         construction.
  void check_groups() const { check_groups_are(base_lrs_.size()); }
  /// Sets initial rates, for a schedule that has its own.
  void set_base_lrs(std::vector<double> lrs) { base_lrs_ = std::move(lrs); }
  /// Sets the epoch that the next step() goes to.
  void set_next_epoch(int64_t epoch) { step_count_ = static_cast<unsigned>(epoch); }

 private:
  friend class SequentialLR;
  friend class ChainedScheduler;

  std::vector<double> get_lrs() final;
  void check_groups_are(size_t count) const;
  /// Sets epoch 0, whatever the epoch was.
  void restart(bool follows_another);
  /// Throws unless parts() are fresh schedules of its optimizer.
  void check_parts() const;
  /// Gives all parts the initial rates, because each constructor changed those that the next one
  /// found.
  void share_base_lrs();
  /// Its parts in the order of construction.
  std::vector<LRScheduler*> parts_by_creation() const;
  void set_lrs(const std::vector<double>& lrs);
  void save_parts(torch::serialize::OutputArchive& archive) const;
  void load_parts(torch::serialize::InputArchive& archive);

  torch::optim::Optimizer& optimizer_;
  const char* name_;
  std::vector<double> base_lrs_;
  uint64_t creation_number_;  // rises with each schedule that the process constructs
  bool follows_another_ = false;
};

/// One value for all parameter groups, or one for each.
class PerGroup {
 public:
  /// The same value for all groups.
  PerGroup(double value) : values_{value} {}
  /// One for each group.
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}
  /// One for each group.
  PerGroup(std::initializer_list<double> values) : values_(values) {}

  /// One value, or one for each group.
  const std::vector<double>& values() const { return values_; }

 private:
  std::vector<double> values_;
};

/// lr = initial lr * lr_lambda(epoch). The functions are not saved.
class DDP_API LambdaLR final : public LRScheduler {
 public:
  /// The factor at an epoch.
  using Lambda = std::function<double(int64_t epoch)>;

  /// \param lr_lambda  for all parameter groups.
  /// \throws c10::ValueError  an empty one.
  LambdaLR(torch::optim::Optimizer& optimizer, Lambda lr_lambda);
  /// \param lr_lambdas  one a parameter group.
  /// \throws c10::ValueError  another number of them, or an empty one.
  LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Lambda> lr_lambdas);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;

  std::vector<Lambda> lr_lambdas_;
};

/// Options for `MultiStepLR`.
struct MultiStepLROptions {
  MultiStepLROptions() = default;
  /// These milestones, and the defaults of all other options.
  MultiStepLROptions(std::vector<int64_t> milestones) : milestones_(std::move(milestones)) {}

  /// Epochs at which the rate is multiplied; a repeated one counts twice.
  TORCH_ARG(std::vector<int64_t>, milestones) = {};
  /// The factor. Default: 0.1
  TORCH_ARG(double, gamma) = 0.1;
};

/// Multiplies the rate by `gamma` at each milestone.
class DDP_API MultiStepLR final : public LRScheduler {
 public:
  /// Sets the rates of epoch 0.
  MultiStepLR(torch::optim::Optimizer& optimizer, MultiStepLROptions options);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override;

  MultiStepLROptions options_;
};

/// Options for `LinearLR`.
struct LinearLROptions {
  /// The factor of the rate at epoch 0, in (0, 1]. Default: 1/3
  TORCH_ARG(double, start_factor) = 1.0 / 3;
  /// The factor from epoch `total_iters` on, in [0, 1]. Default: 1
  TORCH_ARG(double, end_factor) = 1.0;
  /// Epochs from the first factor to the second, >= 1. Default: 5
  TORCH_ARG(int64_t, total_iters) = 5;
};

/// A warm-up: the rate grows (or falls) linearly, and then stays.
class DDP_API LinearLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  an option out of its range.
  explicit LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options = {});

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override;

  LinearLROptions options_;
};

/// Options for `ConstantLR`.
struct ConstantLROptions {
  /// The factor of the rate until epoch `total_iters`, in (0, 1]. Default: 1/3
  TORCH_ARG(double, factor) = 1.0 / 3;
  /// The epoch at which the rate is the initial one again, >= 1. Default: 5
  TORCH_ARG(int64_t, total_iters) = 5;
};

/// Multiplies the rate by `factor` for some epochs.
class DDP_API ConstantLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  an option out of its range.
  explicit ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options = {});

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override;

  ConstantLROptions options_;
};

/// Multiplies the rate by `gamma` in each epoch.
class DDP_API ExponentialLR final : public LRScheduler {
 public:
  /// \param gamma  the factor.
  ExponentialLR(torch::optim::Optimizer& optimizer, double gamma);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override { return base_lrs(); }

  double gamma_;
};

/// Options for `PolynomialLR`.
struct PolynomialLROptions {
  /// The epoch at which the rate is 0, >= 1. Default: 5
  TORCH_ARG(int64_t, total_iters) = 5;
  /// The exponent. Default: 1
  TORCH_ARG(double, power) = 1.0;
};

/// lr = initial lr * (1 - epoch / total_iters)^power, and then 0.
class DDP_API PolynomialLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  total_iters below 1.
  explicit PolynomialLR(
      torch::optim::Optimizer& optimizer, const PolynomialLROptions& options = {});

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override { return base_lrs(); }

  PolynomialLROptions options_;
};

/// Multiplies the rate by lr_lambda(epoch) in each epoch from 1 on. The functions are not saved.
class DDP_API MultiplicativeLR final : public LRScheduler {
 public:
  /// The factor at an epoch.
  using Lambda = std::function<double(int64_t epoch)>;

  /// \param lr_lambda  for all parameter groups.
  /// \throws c10::ValueError  an empty one.
  MultiplicativeLR(torch::optim::Optimizer& optimizer, Lambda lr_lambda);
  /// \param lr_lambdas  one a parameter group.
  /// \throws c10::ValueError  another number of them, or an empty one.
  MultiplicativeLR(torch::optim::Optimizer& optimizer, std::vector<Lambda> lr_lambdas);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override { return multiplied(0); }
  std::vector<double> multiplied(int64_t epoch) const;

  std::vector<Lambda> lr_lambdas_;
};

/// Options for `CosineAnnealingLR`.
struct CosineAnnealingLROptions {
  CosineAnnealingLROptions() = default;
  /// This T_max, and the defaults of all other options.
  CosineAnnealingLROptions(int64_t T_max) : T_max_(T_max) {}

  /// Epochs from the initial rate to `eta_min`, >= 1; as many again lead back. Must be set.
  TORCH_ARG(int64_t, T_max) = 0;
  /// The least rate. Default: 0
  TORCH_ARG(double, eta_min) = 0;
};

/// Half a cosine from the initial rate to `eta_min` (Loshchilov and Hutter, arXiv:1608.03983,
/// without restarts).
class DDP_API CosineAnnealingLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  T_max below 1.
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, const CosineAnnealingLROptions& options);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<double> first_lrs_in_sequence() override;

  CosineAnnealingLROptions options_;
};

/// Options for `SWALR`.
struct SWALROptions {
  SWALROptions() = default;
  /// This rate, and the defaults of all other options.
  SWALROptions(PerGroup swa_lr) : swa_lr_(std::move(swa_lr)) {}

  /// The rate to stay at, for all parameter groups or for each. Must be set.
  TORCH_ARG(PerGroup, swa_lr) = std::vector<double>();
  /// Epochs until it is reached, >= 0. Default: 10
  TORCH_ARG(int64_t, anneal_epochs) = 10;
  /// "cos" or "linear". Default: "cos"
  TORCH_ARG(std::string, anneal_strategy) = "cos";
};

/// Leads the rate from what it is to a constant one, for stochastic weight averaging
/// (AveragedModel; Izmailov et al., arXiv:1803.05407). Construct it beside the schedule of the
/// epochs before, and step it in their place once averaging begins.
class DDP_API SWALR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  an option is out of its range.
  SWALR(torch::optim::Optimizer& optimizer, SWALROptions options);

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  double anneal(double share) const;

  SWALROptions options_;
};

/// Options for `OneCycleLR`.
struct OneCycleLROptions {
  OneCycleLROptions() = default;
  /// The options that must be set; the others have defaults.
  OneCycleLROptions(PerGroup max_lr, int64_t total_steps)
      : max_lr_(std::move(max_lr)), total_steps_(total_steps) {}

  /// The highest rate, for all parameter groups or for each. Must be set.
  TORCH_ARG(PerGroup, max_lr) = std::vector<double>();
  /// Steps of the cycle, >= 1. Unset: epochs * steps_per_epoch, which must be set then.
  TORCH_ARG(std::optional<int64_t>, total_steps) = {};
  /// With steps_per_epoch, instead of total_steps; >= 1.
  TORCH_ARG(std::optional<int64_t>, epochs) = {};
  /// With epochs, instead of total_steps; >= 1.
  TORCH_ARG(std::optional<int64_t>, steps_per_epoch) = {};
  /// The share of the cycle in which the rate rises, in [0, 1]. Default: 0.3
  TORCH_ARG(double, pct_start) = 0.3;
  /// "cos" or "linear". Default: "cos"
  TORCH_ARG(std::string, anneal_strategy) = "cos";
  /// Whether momentum (SGD, RMSprop) or beta1 (Adam, AdamW) moves against the rate. Default: true
  TORCH_ARG(bool, cycle_momentum) = true;
  /// Momentum where the rate is highest. Default: 0.85
  TORCH_ARG(PerGroup, base_momentum) = 0.85;
  /// Momentum where the rate is lowest. Default: 0.95
  TORCH_ARG(PerGroup, max_momentum) = 0.95;
  /// initial rate = max_lr / div_factor. Default: 25
  TORCH_ARG(double, div_factor) = 25;
  /// least rate = initial rate / final_div_factor. Default: 1e4
  TORCH_ARG(double, final_div_factor) = 1e4;
  /// Whether a third phase leads from the initial rate to the least one; otherwise the second phase
  /// leads there. Default: false
  TORCH_ARG(bool, three_phase) = false;
};

/// Raises the rate to `max_lr` and lowers it again, far below its initial value (Smith and Topin,
/// arXiv:1708.07120). Step it once a batch.
class DDP_API OneCycleLR final : public LRScheduler {
 public:
  /// \throws c10::ValueError  an option is out of its range, or cycle_momentum is set and the
  ///         optimizer has no momentum.
  OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options);

 private:
  enum class Level { Initial, Max, Min };
  /// A phase up to `end_step`; the rate and the momentum go from those of `from` to those of `to`.
  struct Phase {
    double end_step;
    Level from;
    Level to;
  };

  /// \throws c10::ValueError  after the last step.
  std::vector<double> next_lrs(int64_t epoch) override;
  bool has_own_base_lrs() const override { return true; }
  bool sets_initial_lrs() const override { return true; }
  void check_options() const;
  std::vector<Phase> make_phases() const;
  double lr_at(Level level, size_t group) const;
  double momentum_at(Level level, size_t group) const;
  double anneal(double start, double end, double share) const;

  OneCycleLROptions options_;
  int64_t total_steps_;
  std::vector<Phase> phases_;
};

/// Runs schedules one after the other: number k + 1 begins at epoch `milestones[k]`, with its own
/// epoch 0.
class DDP_API SequentialLR final : public LRScheduler {
 public:
  /// \param schedulers  of this optimizer; not stepped yet, and stepped only by this object from
  ///        here on. They must outlive it.
  /// \param milestones  rising; one less than schedulers.
  /// \throws c10::ValueError  these conditions do not hold, or one of them has schedules itself.
  SequentialLR(
      torch::optim::Optimizer& optimizer, std::vector<LRScheduler*> schedulers,
      std::vector<int64_t> milestones);

  /// Saves the schedules' states, too.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<LRScheduler*> parts() const override { return schedulers_; }

  std::vector<LRScheduler*> schedulers_;
  std::vector<int64_t> milestones_;
};

/// Steps several schedules of one optimizer at once, in the order of the list.
class DDP_API ChainedScheduler final : public LRScheduler {
 public:
  /// \param schedulers  as SequentialLR's; at least one. One may be a SequentialLR.
  /// \throws c10::ValueError  they are not, or one of them is a ChainedScheduler.
  ChainedScheduler(torch::optim::Optimizer& optimizer, std::vector<LRScheduler*> schedulers);
  /// The same, in Python's form.
  explicit ChainedScheduler(std::vector<LRScheduler*> schedulers);

  /// Saves the schedules' states, too.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  static torch::optim::Optimizer& optimizer_of(const std::vector<LRScheduler*>& schedulers);
  std::vector<double> next_lrs(int64_t epoch) override;
  std::vector<LRScheduler*> parts() const override { return schedulers_; }

  std::vector<LRScheduler*> schedulers_;
};

/// Returns base * number of ranks: the linear scaling rule for a batch that grows with the ranks
/// (Goyal et al., arXiv:1706.02677, who warm the rate up over the first five epochs: LinearLR, or
/// SequentialLR).
///
/// \param group  unset: the default group.
DDP_API double scaled_lr(double base, const GroupArg& group = {});

}  // namespace ddp
