#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

/// The base classes of the optimizers of `<ddp/optim.h>` that LibTorch lacks: the lists of their
/// options and state in optimizer_kinds.h serve their files, too.
namespace ddp::detail {

/// The base of an optimizer's options.
template <typename Options>
class DDP_API ListedOptions : public torch::optim::OptimizerCloneableOptions<Options> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

/// The base of a parameter's state.
template <typename State, typename Options>
class DDP_API ListedState : public torch::optim::OptimizerCloneableParamState<State> {
 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Parameters of one group, device and dtype, and of one count of steps, that have a gradient.
template <typename State>
struct StepBatch {
  int64_t step;  // the number of this step, from 1
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<State*> states;

  /// A tensor of each state, made with zeros where it is undefined.
  ///
  /// \param tensor_of  returns its reference in a state.
  template <typename TensorOf>
  std::vector<at::Tensor> each(TensorOf tensor_of) const;
};

/// The base of an optimizer. Groups without options get the defaults.
template <typename OptionsType, typename StateType>
class DDP_API ListedOptimizer : public torch::optim::Optimizer {
 public:
  /// \throws c10::ValueError  an option outside of its range.
  explicit ListedOptimizer(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const OptionsType& defaults = {});
  /// One group.
  explicit ListedOptimizer(std::vector<at::Tensor> parameters, const OptionsType& defaults = {});

  void save(torch::serialize::OutputArchive& archive) const override;
  /// \throws c10::ValueError  an archive of another optimizer of this library that LibTorch lacks.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// The state of a parameter, made where it has none.
  StateType& state_of(const at::Tensor& parameter);
};

/// The base of an optimizer that steps each parameter on its own, and counts the steps.
template <typename OptionsType, typename StateType>
class DDP_API BatchedOptimizer : public ListedOptimizer<OptionsType, StateType> {
 public:
  using ListedOptimizer<OptionsType, StateType>::ListedOptimizer;

  /// Runs the closure, which computes the gradients anew, and steps the parameters that have one.
  ///
  /// \return what the closure returns; undefined without one.
  /// \throws c10::ValueError  a sparse gradient or a complex parameter; options of a group of
  ///         add_param_group() that the constructor would refuse. No parameter has changed then.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

 protected:
  using Batch = StepBatch<StateType>;

  /// Steps a batch. Parameters on a CPU come one at a time, which keeps them in its caches, and
  /// those of a GPU together, for its kernels that take lists.
  virtual void step_batch(const OptionsType& options, const Batch& batch) = 0;
};

}  // namespace ddp::detail
