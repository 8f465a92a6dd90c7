#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// Averages parameters among ranks, in some steps. Every rank calls it after every optimizer step.
class DDP_API ModelAverager {
 public:
  virtual ~ModelAverager() = default;

  /// Counts a step, and averages the parameters in place if it is a step that averages.
  ///
  /// \param parameters  the same on every rank, in number, shapes and order. All are averaged, also
  ///        those without a gradient, which Python leaves out.
  ///
  /// Collective: in the steps that average. Cost: then, one all-reduce of all parameters, and a
  ///   copy of them.
  void average_parameters(const std::vector<at::Tensor>& parameters);
  /// Averages the parameters of all groups.
  void average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups);

  /// How many steps were counted.
  int64_t step() const { return step_; }
  /// As Elastic names it: step().
  int64_t steps() const { return step_; }
  /// Sets the count, as when training is resumed.
  void set_step(int64_t step);

  /// Averages over the ranks of another group from now on, after ranks were lost or have joined.
  /// Only averagers that were made with a group need it: others use the default group of the
  /// moment.
  ///
  /// Collective: where the averager makes groups.
  virtual void rebind(const GroupArg& group = {}) = 0;

  /// Saves the count, and what else the averager keeps.
  virtual void save(torch::serialize::OutputArchive& archive) const;
  /// \throws c10::Error  the archive is not from save().
  virtual void load(torch::serialize::InputArchive& archive);

 protected:
  ModelAverager() = default;
  /// Copies the count.
  ModelAverager(const ModelAverager&) = default;
  /// Copies the count.
  ModelAverager& operator=(const ModelAverager&) = default;

 private:
  /// Does what is due after step `step`, from 0, without autograd.
  virtual void apply(const std::vector<at::Tensor>& parameters, int64_t step) = 0;

  int64_t step_ = 0;
};

/// Averages every `period` steps, from step `warmup_steps` on, counted from 0: with a period of 3
/// and 2 steps of warm-up in steps 2, 5, 8... As Python's `PeriodicModelAverager`.
class DDP_API PeriodicModelAverager final : public ModelAverager {
 public:
  /// \param group  none is the default group of the moment.
  /// \throws c10::ValueError  a period below 1, negative warm-up.
  explicit PeriodicModelAverager(
      int64_t period, int64_t warmup_steps = 0, const GroupArg& group = {});

  void rebind(const GroupArg& group = {}) override;

 private:
  void apply(const std::vector<at::Tensor>& parameters, int64_t step) override;

  int64_t period_;
  int64_t warmup_steps_;
  GroupArg group_;  // left out: the default group of the moment
};

/// Steps an optimizer, then averages the parameters if the averager says so. For use under
/// no_sync(), or without a wrapper at all. The optimizer's state, such as its momentum, stays each
/// rank's own.
///
/// ```
/// ddp::PostLocalSGDOptimizer optimizer(
///     std::make_shared<torch::optim::SGD>(model->parameters(), 0.1),
///     std::make_shared<ddp::PeriodicModelAverager>(4, 100));
/// ```
///
/// Schedulers take `optimizer.optimizer()`.
class DDP_API PostLocalSGDOptimizer {
 public:
  /// \throws c10::ValueError  a null pointer.
  PostLocalSGDOptimizer(
      std::shared_ptr<torch::optim::Optimizer> optimizer, std::shared_ptr<ModelAverager> averager);

  /// Collective: in the steps that average.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  /// Calls the optimizer's zero_grad.
  void zero_grad(bool set_to_none = true) { optimizer_->zero_grad(set_to_none); }

  /// The optimizer that it steps.
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  /// Saves the optimizer's state, and the averager's count.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads what save() wrote.
  void load(torch::serialize::InputArchive& archive);

 private:
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<ModelAverager> averager_;
};

}  // namespace ddp
