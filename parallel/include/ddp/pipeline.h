#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/stage_module.h>
#include <ddp/export.h>
#include <ddp/parameter_layout.h>
#include <ddp/pipeline_schedule.h>
#include <ddp/pipeline_stats.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

namespace ddp {

/// \file
/// Pipelines: each rank has some of a model's layers, a stage, and micro-batches go through the
/// stages one after the other.

/// A parameter that several stages have: the embedding of the first, which is the head of the last,
/// too. Its copies get the same values when stages are made, and the sum of the copies' gradients
/// in each step; so an optimizer keeps them equal.
///
/// ```
/// ddp::PipelineOptions options;
/// if (pp > 1) {  // else one module has it alone
///   const auto ends = ddp::new_group({0, pp - 1}, mesh.group("pp"));  // on all ranks
///   if (ends) options.tied({{model->module()->embedding->weight, ends}});
/// }
/// ```
struct TiedParameter {
  /// A parameter of this rank's module: on each rank of the same shape and dtype, of the same part
  /// where wrappers or layers cut it, and with the same name, which is saved once. A sharded one is
  /// a unit of its own.
  at::Tensor parameter;
  /// The ranks that have it: some of those of the pipeline.
  ProcessGroup group;
};

/// Options for `PipelineStage`, the same on all stages.
struct PipelineOptions {
  /// How many parts a batch is cut into, along dimension 0. Default: 4
  TORCH_ARG(int64_t, microbatches) = 4;
  /// The ranks of the pipeline, in the order of the stages: an axis of a mesh, `mesh.group("pp")`.
  /// Default: the default group
  TORCH_ARG(GroupArg, process_group) = {};
  /// Multiply the loss of a micro-batch by its share of the batch's rows, so that gradients are
  /// those of the batch's mean. False: for a loss function whose values add up to the batch's loss,
  /// such as a sum over tokens divided by the tokens of the batch. Default: true
  TORCH_ARG(bool, scale_grads) = true;
  /// Where the modules are wrappers that average gradients: do it in each backward pass, and not in
  /// the last one of a step. Saves the memory of whole gradients with FullyShardedDataParallel; a
  /// DistributedDataParallel needs Reduction::Mean. Default: false
  TORCH_ARG(bool, reduce_each) = false;
  /// In which order forwards and backwards run. Several chunks need GPipe or Interleaved.
  /// Default: OneFOneB
  TORCH_ARG(PipelineSchedule, schedule) = PipelineSchedule::OneFOneB;
  /// Over a backend that waits on streams, such as NCCL: what stages pass to each other may differ
  /// between batches of equal sizes and dtypes, because it depends on values or on which layers are
  /// frozen, so that each message has a header, and the hosts wait for each other's. Elsewhere each
  /// has one. Default: false
  TORCH_ARG(bool, dynamic_shapes) = false;
  /// What the last stage does to a loss before backward: a GradScaler's scale(). Default: nothing
  TORCH_ARG(std::function<at::Tensor(const at::Tensor&)>, scale_loss) = {};
  /// Parameters of this rank that other stages have, too; not the same on all stages. Several over
  /// one group in the same order on its ranks. Default: none
  TORCH_ARG(std::vector<TiedParameter>, tied) = {};
};

/// What a step computed: on the last stage; empty on the others.
struct PipelineResult {
  /// Of each micro-batch, as the loss function returned it, detached.
  std::vector<at::Tensor> losses;
  /// Of the whole batch, detached; undefined where the outputs of micro-batches differ in more than
  /// rows.
  at::Tensor output;
};

/// The loss of a micro-batch: a tensor of one element.
using LossFn = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

class PipelineRunner;

/// The part of a PipelineStage that does not depend on the module's type.
class DDP_API PipelineStageBase : public torch::nn::Module, public ShardedModule {
 public:
  ~PipelineStageBase() override;
  C10_DISABLE_COPY_AND_ASSIGN(PipelineStageBase);

  /// Forward and backward of a batch. Gradients are added to `.grad`, as by one backward pass of
  /// the whole model with the batch's mean as its loss; so several steps accumulate, whatever the
  /// reduction. With Reduction::Sum the earlier gradients take memory twice during a step.
  ///
  /// \param inputs  the first stage's arguments, of the whole batch: at least as many rows as
  ///         micro-batches. Gradients flow to those that require one. Empty on other stages.
  /// \param target  of the whole batch, on the last stage.
  /// \throws c10::Error  on every rank, when a stage throws: names the action, "B2 of stage 1", and
  ///         the rank. A rank that has done its part of the step throws in the next one. The
  ///         process groups are then aborted.
  ///
  /// Collective: yes, over the stages. Blocks: host; over a backend that waits on streams (NCCL)
  /// only until the first stage's host begins its call, and in the first call with a batch of some
  /// sizes for headers: results are there on the current stream. Memory: inputs, and what autograd
  /// saves, of as many micro-batches as the schedule keeps.
  PipelineResult step(const std::vector<at::Tensor>& inputs, const at::Tensor& target);

  /// Forward of a batch, without graphs. Does not change the mode of the modules; eval() without
  /// arguments does.
  ///
  /// \param inputs  as in step(), of one row or more. With fewer rows than micro-batches the stages
  ///         still run a forward for each micro-batch, so that ranks call as many collectives
  ///         whatever their rows: the last ones get rows of the first once more, and their outputs
  ///         are left out. (Python's refuses such a batch.)
  /// \return  the output on the last stage, as PipelineResult::output; undefined on others.
  ///
  /// Collective: yes, over the stages. Blocks: host.
  at::Tensor eval(const std::vector<at::Tensor>& inputs);
  using torch::nn::Module::eval;

  /// When this rank computed what, in the last steps. Costs two looks at a clock an action; over a
  /// backend that waits on streams, such as NCCL, two events of the device, whose times these are
  /// then. Leaves out steps that the device has not ended, and does not wait for them.
  const PipelineStats& stats() const;

  /// What this rank computes in a step, in order.
  std::vector<PipelineAction> schedule() const;

  /// ShardedModule. The layouts of the chunks, by their names in the chunks: name the modules of
  /// stages by their place in the model.
  std::vector<ParameterLayout> layouts() override;
  /// ShardedModule. True.
  bool is_transparent() const override { return true; }

 protected:
  /// See PipelineStage.
  PipelineStageBase(
      std::vector<detail::StageModule> chunks, int index, int ranks, LossFn loss,
      const PipelineOptions& options);
  /// The same with this rank's place in the options' group.
  PipelineStageBase(
      std::vector<detail::StageModule> chunks, LossFn loss, const PipelineOptions& options);

 private:
  std::shared_ptr<PipelineRunner> runner_;  // a step keeps it, which may destroy this
};

/// One rank's stages of a pipeline.
///
/// ```
/// auto mesh = ddp::init_device_mesh({pp, dp}, {"pp", "dp"});
/// Stage layers(config, mesh.rank("pp"));     // this stage's; names say their place in the model
/// ddp::DistributedDataParallel model(
///     layers, ddp::DistributedDataParallelOptions().process_group(mesh.group("dp")));
/// ddp::PipelineStage pipeline(model, loss,
///     ddp::PipelineOptions().process_group(mesh.group("pp")).microbatches(8));
/// torch::optim::AdamW optimizer(pipeline.parameters(), 3e-4);
/// for (auto& batch : loader) {
///   optimizer.zero_grad();
///   auto result = pipeline.step({batch.data}, batch.target);
///   optimizer.step();
/// }
/// ```
/// A stage's forward takes one argument for each tensor that the stage before returns, or all as a
/// std::vector; it returns a tensor, or anything that holds some (`for_each_tensor`), and on the
/// last stage one tensor. Shapes may differ between micro-batches and steps. Integer tensors, and
/// tensors without gradient, pass. A forward must not change an argument that requires a gradient
/// in place, because it is a leaf.
///
/// A DistributedDataParallel or FullyShardedDataParallel as the module averages gradients once a
/// step, in its last backward pass. Normalization over a batch (BatchNorm) sees micro-batches.
/// Dropout draws in the order of schedule().
///
/// \tparam M  a module holder (Net from TORCH_MODULE, torch::nn::Sequential, ...) or a
///         std::shared_ptr to a module; deduced.
/// \throws c10::Error  at construction, with the same text on every rank, for options that no
///         pipeline can have, or that differ between stages.
///
/// Collective: construction, over the stages. Over NCCL it makes up to four groups of them, for the
///   messages of each kind and direction; process_group is then one that this library made.
/// Threads: use it from one thread.
/// Source: torch.distributed.pipelining, torch 2.11.0, which divides gradients after the step, and
///   needs as many micro-batches as ranks.
template <typename M>
class PipelineStage : public PipelineStageBase {
 public:
  /// \param module  the layers of the stage that is this process's rank in the options' group.
  /// \param loss  may be empty on stages other than the last.
  PipelineStage(M module, LossFn loss, const PipelineOptions& options = {})
      : PipelineStageBase({detail::make_stage_module(module)}, std::move(loss), options),
        chunks_{std::move(module)} {}
  /// \param chunks  chunk c has the layers of stage c * ranks + rank; as many on every rank.
  PipelineStage(std::vector<M> chunks, LossFn loss, const PipelineOptions& options = {})
      : PipelineStageBase(erased(chunks), std::move(loss), options), chunks_(std::move(chunks)) {}

  /// As Python's: checks that the group has the stage that the program means.
  ///
  /// \param module  the layers of stage `index` of `stages`.
  /// \param index  this process's rank in the group.
  PipelineStage(M module, int index, int stages, LossFn loss, const PipelineOptions& options = {})
      : PipelineStageBase(
            {detail::make_stage_module(module)}, index, stages, std::move(loss), options),
        chunks_{std::move(module)} {}
  /// The same for chunks.
  PipelineStage(
      std::vector<M> chunks, int index, int ranks, LossFn loss, const PipelineOptions& options = {})
      : PipelineStageBase(erased(chunks), index, ranks, std::move(loss), options),
        chunks_(std::move(chunks)) {}

  /// A chunk's module.
  M& module(size_t chunk = 0) { return chunks_.at(chunk); }

 private:
  static std::vector<detail::StageModule> erased(const std::vector<M>& chunks) {
    std::vector<detail::StageModule> modules;
    for (const auto& chunk : chunks) modules.push_back(detail::make_stage_module(chunk));
    return modules;
  }

  std::vector<M> chunks_;
};
/// Lets the compiler find M.
template <typename M>
PipelineStage(M, LossFn) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(M, LossFn, PipelineOptions) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(std::vector<M>, LossFn) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(std::vector<M>, LossFn, PipelineOptions) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(M, int, int, LossFn) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(M, int, int, LossFn, PipelineOptions) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(std::vector<M>, int, int, LossFn) -> PipelineStage<M>;
/// Lets the compiler find M.
template <typename M>
PipelineStage(std::vector<M>, int, int, LossFn, PipelineOptions) -> PipelineStage<M>;

}  // namespace ddp
