#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ddp/detail/zero_types.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <ddp/gradients.h>
#include <ddp/join.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

namespace ddp {

struct ShardedGradients;

/// Options for `ZeroRedundancyOptimizer`; the same on every rank.
struct ZeroOptions {
  /// The ranks that share the state. With stage 2 or overlap, the model's. Default: the model's
  TORCH_ARG(GroupArg, process_group) = {};
  /// 1: each rank keeps its part of the optimizer's state. 2: also only its part of the gradients,
  /// so that `.grad` is undefined after an averaged backward pass. Default: 1
  TORCH_ARG(int, stage) = 1;
  /// Step at the end of every averaged backward pass, bucket by bucket, and send the new parameters
  /// of one bucket while the gradients of the next are reduced; step() then does nothing. Not for
  /// programs that change the gradients before the step (clipping, a GradScaler). Default: false
  TORCH_ARG(bool, overlap) = false;
  /// Keep the state of parameters on a device in the host's memory, and step them on the CPU: a
  /// step copies their values and gradients down and the new values up, a few MiB at a time, while
  /// the CPU steps what came before. The same bits as the optimizer's step on CPUs. Parameters on
  /// CPUs have their state there anyway: a warning. Default: false
  TORCH_ARG(bool, offload) = false;
  /// Keep the state in a file, which need not fit into the memory: each step reads and writes it
  /// once, in order. The path of a file in a folder of a local disk; each rank makes its own there,
  /// which has no name once it is made, so that ranks may have the same path and nothing is left
  /// after a kill. Implies offload(true). Default: none
  TORCH_ARG(std::optional<std::string>, offload_file) = {};
};

namespace detail {

/// Makes the optimizer of a rank's part, and the state of a parameter.
struct ZeroKind {
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// \param places  of the groups' parameters where needs_whole_tensors; else empty.
  std::function<std::unique_ptr<torch::optim::Optimizer>(
      const Groups&, const torch::optim::OptimizerOptions& defaults, const WholeTensors& places)>
      make;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  bool needs_whole_tensors;
};

}  // namespace detail

/// The part of a sharded optimizer that does not depend on the optimizer's type.
class DDP_API ZeroRedundancyOptimizerBase : public torch::optim::Optimizer, public Joinable {
 public:
  ~ZeroRedundancyOptimizerBase() override;

  /// Steps this rank's part, and gathers the parameters of all ranks.
  ///
  /// \param closure  runs before the step; it may not step again.
  /// \throws c10::Error  a group of parameters was added, or the model was refreshed, since this
  ///         was made; in a join() that this is not part of; with stage 2, gradients of passes
  ///         under no_sync() alone; with offload, the stream is being captured; a disk that does
  ///         not take the state.
  ///
  /// Collective: yes. Blocks: host. Cost: this rank's part of a step; each parameter is sent once.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Goes on with the ranks of another group, after the model's rebind() (no overlap). The parts
  /// are cut anew, with stage 2 those of the gradients, too, which are dropped. They have no state:
  /// load one with load(), a Checkpointer or `ddp::Elastic`, which moves it.
  ///
  /// \throws c10::Error  the model is in its old group; with stage 2, it has had a backward pass in
  ///         the new one. Where this throws, the optimizer is as before, and rebind() may be called
  ///         again.
  ///
  /// Collective: no.
  void rebind(const GroupArg& group = {});

  /// Clears the gradients of all parameters, and with stage 2 this rank's parts. Hides the function
  /// of torch::optim::Optimizer, which does not clear those; ddp::zero_grad calls the right one.
  void zero_grad(bool set_to_none = true);

  /// Writes the whole state, as the optimizer would without sharding, so it can be loaded without
  /// sharding and on any number of ranks. A `Checkpointer` does the same, and needs the memory on
  /// rank 0 alone.
  ///
  /// Collective: yes. Cost: the state of all parameters in memory, for the time of the call.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads this rank's part of a file that save() or an optimizer without sharding wrote.
  ///
  /// Collective: no, but every rank has to load the same. Cost: as save().
  void load(torch::serialize::InputArchive& archive) override;

  /// The bytes of the state of this rank's part.
  size_t local_state_bytes() const;

  /// How even the ranks' parts are: the mean number of elements of a rank over the largest one. 1
  /// where elements are divided, up to a few; less where whole parameters are, as for Muon and
  /// LAMB: one parameter of half the model on 4 ranks leaves at most 0.5.
  double balance() const;

  /// The optimizer of this rank's part, with the options that this one has now: for code that looks
  /// at what a step does, as a `CapturedStep`. Step this one, not that. With offload from a device
  /// its parameters have their values during a step alone.
  torch::optim::Optimizer& local_optimizer() const;

  /// The gradients that this rank steps on: with stage 1 the parameters' gradients, with stage 2
  /// its parts.
  std::vector<at::Tensor> gradients() const;

  /// The options that it was made with.
  const ZeroOptions& options() const;
  /// The ranks that share the state.
  const ProcessGroup& process_group() const;
  /// Whether it is part of a running join(): there, ranks without input step the gradients, but do
  /// not clip or scale them.
  bool is_in_join() const { return join_context() != nullptr; }

  /// The optimizer without sharding, with the whole state; empty on other ranks than `to`. For code
  /// that supports only LibTorch's optimizers.
  ///
  /// \param to  a rank of the group; -1: all of them.
  ///
  /// Collective: yes.
  std::unique_ptr<torch::optim::Optimizer> consolidated(int to = -1) const;
  /// The same without any state, for load_whole() after a state was loaded into it.
  std::unique_ptr<torch::optim::Optimizer> unsharded() const;
  /// Copies the options of `whole`, and this rank's part of its state.
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
  friend c10::IValue own_shard(const ZeroRedundancyOptimizerBase& optimizer);
  friend void take_from_shard(ZeroRedundancyOptimizerBase& optimizer, const c10::IValue& shard);
  friend GradientNorm clip_grad_norm_(
      torch::optim::Optimizer& optimizer, double max_norm, double norm_type);

  /// gradients(), by the groups over which they are cut: by the model's layers, and with stage 2
  /// over process_group().
  std::vector<ShardedGradients> gradient_sets() const;

  std::shared_ptr<Impl> impl_;
};

/// An optimizer whose state is divided among the ranks: each rank holds the state of 1/world of all
/// elements, steps those, and gets the other parameters from the other ranks (Rajbhandari et al.,
/// "ZeRO", 2020, https://arxiv.org/abs/1910.02054, stages 1 and 2). Parameters equal those of the
/// optimizer without sharding, bit for bit where the backend sums in the same order (over shared
/// memory always).
///
/// ```
/// ddp::DistributedDataParallel model(net);
/// ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
///     model, torch::optim::AdamWOptions(1e-3), ddp::ZeroOptions().stage(2));
/// ```
///
/// It is a torch::optim::Optimizer: schedulers and GradScaler work with it, and its groups of
/// parameters hold the options. Elements of the parameters are divided, not whole parameters, so
/// all ranks have equal shares; but Muon and LAMB need whole parameters, which are divided so that
/// the largest share is small: balance() says how even. Parameters move into memory that this
/// allocates; views that were taken of them before keep the old memory.
///
/// Stage 2: clip with `clip_grad_norm_(optimizer, ...)`, since `.grad` is undefined after an
/// averaged backward pass. It knows which parameters the model's layers cut. Under no_sync() whole
/// gradients accumulate. Buckets stay in the reverse order of registration.
///
/// With offload each step has the host wait for the gradients, so a CapturedStep refuses it; a
/// state that consolidated() returns is in the host's memory.
///
/// In a join(), ranks without input step too: `ddp::join({model.get(), &optimizer}, body)`. With
/// overlap, list the model alone.
///
/// \tparam Optim  Adagrad, Adam, AdamW, RMSprop or SGD of LibTorch, or one of `<ddp/optim.h>`: they
///         update each element on its own, or, in stage 1, each parameter.
///
/// Collective: step(), save(), consolidated(). Construction communicates nothing.
/// Source: torch.distributed.optim.ZeroRedundancyOptimizer, torch 2.11.0, which divides whole
///   parameters, and has no stage 2.
template <typename Optim>
class ZeroRedundancyOptimizer : public ZeroRedundancyOptimizerBase {
  static_assert(
      detail::ZeroTypes<Optim>::kAreKnown,
      "ZeroRedundancyOptimizer: takes torch::optim::Adagrad, Adam, AdamW, RMSprop or SGD, or one "
      "of <ddp/optim.h>, which update each parameter on its own");

 public:
  /// The options of Optim.
  using OptionsType = typename detail::ZeroTypes<Optim>::Options;

  /// All parameters of a DistributedDataParallel or of DistributedParameters that require a
  /// gradient.
  ///
  /// \throws c10::ValueError  a stage other than 1 and 2; stage 2 of Muon and LAMB; sparse
  ///         gradients; a process group that is not the model's, with stage 2 or overlap.
  /// \throws c10::Error  with stage 2, a communication hook or an averaged backward pass before;
  ///         an offload_file that cannot be made: then the ranks that have made theirs throw in
  ///         their next collective.
  template <typename Model>
  ZeroRedundancyOptimizer(
      torch::nn::ModuleHolder<Model>& model, const OptionsType& defaults,
      const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(
            model, {torch::optim::OptimizerParamGroup(model->parameters())}, defaults, options) {}

  /// Groups of the model's parameters, with options of their own; parameters in no group are not
  /// stepped.
  template <typename Model>
  ZeroRedundancyOptimizer(
      torch::nn::ModuleHolder<Model>& model,
      const std::vector<torch::optim::OptimizerParamGroup>& groups, const OptionsType& defaults,
      const ZeroOptions& options = {})
      : ZeroRedundancyOptimizerBase(
            wrapper_in(model), groups, std::make_unique<OptionsType>(defaults), kind(), options) {}

 private:
  template <typename Model>
  static std::shared_ptr<DistributedDataParallelBase> wrapper_in(
      torch::nn::ModuleHolder<Model>& model) {
    static_assert(
        std::is_base_of_v<DistributedDataParallelBase, Model>,
        "ZeroRedundancyOptimizer: expected a DistributedDataParallel or DistributedParameters");
    return model.ptr();
  }
  static detail::ZeroKind kind() {
    using Groups = detail::ZeroKind::Groups;
    using Places = detail::WholeTensors;
    constexpr bool takes_places =
        std::is_constructible_v<Optim, const Groups&, const Places&, const OptionsType&>;
    return {
        [](const Groups& groups, const torch::optim::OptimizerOptions& defaults,
           const Places& places) -> std::unique_ptr<torch::optim::Optimizer> {
          const auto& own = static_cast<const OptionsType&>(defaults);
          if constexpr (takes_places) {
            if (!places.empty()) return std::make_unique<Optim>(groups, places, own);
          }
          return std::make_unique<Optim>(groups, own);
        },
        [] { return std::make_unique<typename detail::ZeroTypes<Optim>::State>(); },
        detail::ZeroTypes<Optim>::kNeedWholeTensors};
  }
};

}  // namespace ddp
