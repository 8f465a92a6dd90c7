#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <ddp/gradients.h>
#include <ddp/join.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace ddp {

/// Options for `ZeroRedundancyOptimizer`; the same on every rank.
struct ZeroOptions {
  /// The ranks that share the state. With stage 2 or overlap, the model's. Default: the model's
  TORCH_ARG(ProcessGroup, process_group) = {};
  /// 1: each rank keeps its part of the optimizer's state. 2: and of the gradients, so that `.grad`
  /// is undefined after an averaged backward pass. Default: 1
  TORCH_ARG(int, stage) = 1;
  /// Step at the end of every averaged backward pass, bucket by bucket, and send the new parameters
  /// of one while the gradients of the next are on their way; step() then does nothing. Not where
  /// something is to happen to the gradients in between (clipping, a GradScaler). Default: false
  TORCH_ARG(bool, overlap) = false;
};

namespace detail {

/// What an optimizer's options and its state of a parameter are.
template <typename Optimizer>
struct ZeroTypes {
  static constexpr bool kAreKnown = false;
};
template <typename OptionsType, typename StateType>
struct KnownZeroTypes {
  static constexpr bool kAreKnown = true;
  using Options = OptionsType;
  using State = StateType;
};
template <>
struct ZeroTypes<torch::optim::Adagrad>
    : KnownZeroTypes<torch::optim::AdagradOptions, torch::optim::AdagradParamState> {};
template <>
struct ZeroTypes<torch::optim::Adam>
    : KnownZeroTypes<torch::optim::AdamOptions, torch::optim::AdamParamState> {};
template <>
struct ZeroTypes<torch::optim::AdamW>
    : KnownZeroTypes<torch::optim::AdamWOptions, torch::optim::AdamWParamState> {};
template <>
struct ZeroTypes<torch::optim::RMSprop>
    : KnownZeroTypes<torch::optim::RMSpropOptions, torch::optim::RMSpropParamState> {};
template <>
struct ZeroTypes<torch::optim::SGD>
    : KnownZeroTypes<torch::optim::SGDOptions, torch::optim::SGDParamState> {};

/// How to make the optimizer that each rank has of its part, and the state of a parameter.
struct ZeroKind {
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  std::function<std::unique_ptr<torch::optim::Optimizer>(
      const Groups&, const torch::optim::OptimizerOptions& defaults)>
      make;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
};

}  // namespace detail

/// What does not depend on the optimizer that is sharded.
class DDP_API ZeroRedundancyOptimizerBase : public torch::optim::Optimizer, public Joinable {
 public:
  ~ZeroRedundancyOptimizerBase() override;

  /// Steps this rank's part, and gathers everybody's parameters.
  ///
  /// \param closure  runs before; it may not step again.
  /// \throws c10::Error  a group of parameters was added, or the model was refreshed, since this
  ///         was made; in a join() that this is not part of; with stage 2, gradients of passes
  ///         under no_sync() alone.
  ///
  /// Collective: yes. Blocks: host. Cost: beside this rank's part of a step, each parameter travels
  ///   once.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Clears the gradients of all parameters, and with stage 2 this rank's parts. Shadows
  /// torch::optim::Optimizer's, which cannot see those; ddp::zero_grad calls the right one.
  void zero_grad(bool set_to_none = true);

  /// Writes the state of the whole, as the optimizer would without sharding: it loads there, and
  /// on any number of ranks. A `Checkpointer` does the same, and asks for memory on rank 0 alone.
  ///
  /// Collective: yes. Cost: the state of all parameters in memory, for the time of the call.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Takes this rank's part of what save() or an optimizer without sharding wrote.
  ///
  /// Collective: no, but every rank has to load the same. Cost: as save().
  void load(torch::serialize::InputArchive& archive) override;

  /// Of this rank's part.
  size_t local_state_bytes() const;

  /// The gradients that this rank steps on: with stage 1 the parameters', with stage 2 its parts.
  std::vector<at::Tensor> gradients() const;

  /// What it was made with.
  const ZeroOptions& options() const;
  /// The ranks that share the state.
  const ProcessGroup& process_group() const;
  /// Whether it is part of a join() that is under way: ranks without input step, and do nothing
  /// else to gradients.
  bool is_in_join() const { return join_context() != nullptr; }

  /// The optimizer without sharding, with the whole state; empty on other ranks than `to`. For code
  /// that knows LibTorch's optimizers alone.
  ///
  /// \param to  a rank of the group; -1: all of them.
  ///
  /// Collective: yes.
  std::unique_ptr<torch::optim::Optimizer> consolidated(int to = -1) const;
  /// The same without any state, which load_whole() takes once it has one.
  std::unique_ptr<torch::optim::Optimizer> unsharded() const;
  /// Takes over options, and this rank's part of the state.
  void load_whole(const torch::optim::Optimizer& whole);

  /// Joinable: in `ddp::join({model.get(), &optimizer}, ...)`.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  ProcessGroup join_process_group() const override;

 protected:
  /// See ZeroRedundancyOptimizer.
  ZeroRedundancyOptimizerBase(
      std::shared_ptr<DistributedDataParallelBase> model,
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      std::unique_ptr<torch::optim::OptimizerOptions> defaults, detail::ZeroKind kind,
      const ZeroOptions& options);

 private:
  class Impl;
  class ZeroJoinHook;

  std::shared_ptr<Impl> impl_;
};

/// An optimizer whose state is divided among the ranks: each has that of 1/world of all elements,
/// steps those, and gets the other parameters from the others (Rajbhandari et al., "ZeRO", 2020,
/// https://arxiv.org/abs/1910.02054, stages 1 and 2). Parameters become those of the optimizer
/// without it, bit for bit where the backend sums in the same order (over shared memory always).
///
/// ```
/// ddp::DistributedDataParallel model(net);
/// ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
///     model, torch::optim::AdamWOptions(1e-3), ddp::ZeroOptions().stage(2));
/// ```
///
/// It is a torch::optim::Optimizer: schedulers and GradScaler take it, and its groups of parameters
/// hold the options. Each element of the parameters, not each parameter, has its rank: no rank has
/// more than its share. Parameters move into memory that this makes; views of them that were taken
/// before no longer see them.
///
/// Stage 2: clip with `clip_grad_norm_(optimizer, ...)`, for `.grad` is undefined after an
/// averaged backward pass. Under no_sync() gradients accumulate whole. Buckets stay in the order of
/// registration, reversed.
///
/// In a join(), ranks without input step as well: `ddp::join({model.get(), &optimizer}, body)`.
/// With overlap, the model alone.
///
/// \tparam Optim  Adagrad, Adam, AdamW, RMSprop or SGD of LibTorch, which update each element on
///         its own.
///
/// Collective: step(), save(), consolidated(). Construction communicates nothing.
/// Source: torch.distributed.optim.ZeroRedundancyOptimizer, torch 2.11.0, which divides whole
///   parameters, and has no stage 2.
template <typename Optim>
class ZeroRedundancyOptimizer : public ZeroRedundancyOptimizerBase {
  static_assert(
      detail::ZeroTypes<Optim>::kAreKnown,
      "ZeroRedundancyOptimizer: takes torch::optim::Adagrad, Adam, AdamW, RMSprop or SGD, which "
      "update each element on its own");

 public:
  /// The options of Optim.
  using OptionsType = typename detail::ZeroTypes<Optim>::Options;

  /// All parameters of the model that require a gradient.
  ///
  /// \throws c10::ValueError  a stage other than 1 and 2; sparse gradients; a process group that is
  ///         not the model's, with stage 2 or overlap.
  /// \throws c10::Error  with stage 2, a communication hook or an averaged backward pass before.
  template <typename M>
  ZeroRedundancyOptimizer(
      DistributedDataParallel<M>& model, const OptionsType& defaults,
      const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(
            model, {torch::optim::OptimizerParamGroup(model->parameters())}, defaults, options) {}

  /// Groups of the model's parameters, with options of their own; parameters in none are not
  /// stepped.
  template <typename M>
  ZeroRedundancyOptimizer(
      DistributedDataParallel<M>& model,
      const std::vector<torch::optim::OptimizerParamGroup>& groups, const OptionsType& defaults,
      const ZeroOptions& options = {})
      : ZeroRedundancyOptimizerBase(
            model.ptr(), groups, std::make_unique<OptionsType>(defaults), kind(), options) {}

 private:
  static detail::ZeroKind kind() {
    return {
        [](const auto& groups, const torch::optim::OptimizerOptions& defaults) {
          return std::make_unique<Optim>(groups, static_cast<const OptionsType&>(defaults));
        },
        [] { return std::make_unique<typename detail::ZeroTypes<Optim>::State>(); }};
  }
};

}  // namespace ddp
