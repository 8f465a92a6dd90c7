#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <ddp/comm_hooks.h>
#include <ddp/detail/replayed_call.h>
#include <ddp/distributed_data_parallel_options.h>
#include <ddp/export.h>
#include <ddp/join.h>
#include <ddp/move_tensors.h>
#include <ddp/output_tensors.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <ddp/reduction_stats.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace ddp {

class ZeroRedundancyOptimizerBase;

/// While the guard exists, backward passes accumulate gradients on this rank only. The `forward`
/// whose backward shall not communicate has to run inside; `sync_in_backward()` averages the
/// backward pass of one that did. Guards may be nested; each restores the setting that it found. It
/// must not outlive its model.
class [[nodiscard]] NoSyncGuard {
 public:
  /// Use `no_sync()`.
  explicit NoSyncGuard(bool& gradient_sync)
      : gradient_sync_(gradient_sync), previous_(std::exchange(gradient_sync, false)) {}
  ~NoSyncGuard() { gradient_sync_ = previous_; }
  C10_DISABLE_COPY_AND_ASSIGN(NoSyncGuard);

 private:
  bool& gradient_sync_;
  bool previous_;
};

/// The part of a wrapper that does not depend on the wrapped type.
class DDP_API DistributedDataParallelBase : public torch::nn::Module,
                                            public Joinable,
                                            public ShardedModule {
 public:
  ~DistributedDataParallelBase() override;

  /// Runs `function` as a forward pass, and returns what it returns: for other methods of the model
  /// than `forward`, and for helper functions that take the module itself.
  /// ```
  /// auto [action, log_prob] = model->run([&] { return net->sample(state); });
  /// auto loss = model->run([&] { return loss_of(*model->module(), batch); });
  /// ```
  /// All that holds for `forward` holds for it: the backward pass through its result averages the
  /// gradients, in no_sync() it does not, and every rank has to run as many. Several in a step are
  /// several forward passes. Its tensors are its own: with device_ids or a MixedPrecision it copies
  /// its inputs to the device and to the dtype itself, and with Reduction::SampleWeighted
  /// count_samples() comes before it.
  ///
  /// Collective: no, except in a join() with throw_on_early_termination.
  template <typename Function>
  decltype(auto) run(Function&& function) {
    return run_pass(std::nullopt, std::forward<Function>(function));
  }

  /// Accumulates gradients without communication while the guard exists:
  /// ```
  /// { auto guard = model->no_sync(); model->forward(a).sum().backward(); }
  /// model->forward(b).sum().backward();   // averages the gradients of a and b
  /// ```
  NoSyncGuard no_sync();

  /// Averages the next backward pass that runs through `outputs`, which forward passes inside
  /// no_sync() returned: for schedules in which a forward pass does not know yet whether its
  /// backward pass is the last of the step, because others come in between (1F1B pipelines).
  /// ```
  /// std::vector<torch::Tensor> losses;
  /// for (auto& batch : micro_batches) {
  ///   auto guard = model->no_sync();
  ///   losses.push_back(model->forward(batch).mean());
  /// }
  /// for (auto& loss : losses) {
  ///   if (&loss == &losses.back()) model->sync_in_backward(loss);
  ///   loss.backward();                              // the last one averages all gradients
  /// }
  /// ```
  /// Everything of an averaged pass comes with that one reduction: gradients accumulated before,
  /// rank 0's buffers, and with Reduction::SampleWeighted the samples of all forward passes whose
  /// backward pass ran since the last averaged one. Backward passes that do not run through
  /// `outputs` stay local. Forward passes outside no_sync() are averaged as ever.
  ///
  /// \param outputs  what `forward` returned, or what is computed from it (the loss): a tensor, or
  ///         anything that holds some (`for_each_tensor`); at least one has a graph.
  /// \throws c10::ValueError  where no tensor has a graph.
  /// \throws c10::Error  inside a backward pass. Ranks that wait for this one then throw, too.
  ///
  /// Collective: no, but the backward pass is. Every rank has to call it as often: a call counts as
  ///   a forward pass whose backward pass is averaged.
  template <typename... Outputs>
  void sync_in_backward(const Outputs&... outputs) {
    std::vector<at::Tensor> tensors;
    const TensorSink sink = [&](const at::Tensor& t) { tensors.push_back(t); };
    bool complete = true;
    ((complete = for_each_tensor(outputs, sink) && complete), ...);
    sync_outputs(std::move(tensors), complete);
  }

  /// Trains on this rank's own inputs in `body`, and when they are used up joins the other ranks'
  /// collectives until their inputs end: `ddp::join` for this model alone.
  ///
  /// Only averaged backward passes in `body` have to match on all ranks with input. Each rank may
  /// run forward passes without one, and passes under no_sync(), as it likes. A rank whose input
  /// ends while it accumulates still adds its accumulated gradients to the next average.
  void join(const std::function<void()>& body, const JoinOptions& options = {}) {
    ddp::join({this}, body, options);
  }

  /// Sets the number of samples of the next forward pass, for Reduction::SampleWeighted.
  void count_samples(int64_t samples);

  /// Joinable.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  ProcessGroup join_process_group() const override;

  /// Waits for the ranks' status of the last averaged backward pass, and throws its problems, such
  /// as a missing gradient. Over NCCL the host does not wait for a pass, and without this the next
  /// one throws them: Checkpointer::save(), full_state_dict(), refresh() and
  /// destroy_process_group() settle all models of the job before. Elsewhere it does nothing.
  ///
  /// \throws c10::Error  with the same text on every rank; before the end of a backward pass.
  ///
  /// Collective: yes. Blocks: host, until the device has run that pass. Cost: no message.
  void settle();

  /// Gives all ranks rank 0's buffers now. Needed between steps only for buffers that the program
  /// itself changed.
  ///
  /// Collective: yes. Blocks: host.
  void sync_buffers();

  /// Updates the wrapper after changes of the wrapped module: parameters that were added, replaced,
  /// removed, frozen, unfrozen or moved since it was wrapped, or got data of another shape or dtype
  /// (set_data). Gives all ranks rank 0's values, as construction does (unless init_sync is false).
  /// Call it between two steps: accumulated gradients stay where they still fit their parameter,
  /// earlier forward passes are forgotten. Optimizers are not changed: the program adds new
  /// parameters to its optimizer, and grows or erases the state of a parameter whose shape has
  /// changed. `stats()` begins anew.
  ///
  /// Collective: yes. Blocks: host. Cost: as construction.
  /// \throws c10::Error  as construction, with the same text on every rank; and inside a backward
  ///         pass or a join().
  void refresh();

  /// Goes on with the ranks of another group, after ranks were lost or have joined: with the same
  /// module, optimizer, communication hook and order of buckets, so that a run with as many ranks
  /// ends with the bits of a run without interruption.
  ///
  /// Call it between two steps, on every rank of `group`, also after the old group failed. A rank
  /// that joins wraps its model before, in a group of its own. No value is sent: the program makes
  /// the ranks' models equal before the next step, whose averaged backward pass compares a hash.
  ///
  /// Gradients are dropped, those that accumulated under no_sync() too: a pass that failed leaves
  /// some of them unspecified. `stats()` begins anew.
  ///
  /// \param hook  in place of the registered one, for a hook that has a group of its own. Those of
  ///        `ddp::hooks` that were made without a group use the default group of the moment.
  /// \throws c10::Error  with the same text on every rank: the ranks' models or settings differ, or
  ///         there is a ZeroRedundancyOptimizer with overlap; another one needs its own
  ///         rebind(). Where this throws, the wrapper stays in its old group, and rebind() may be
  ///         called again.
  ///
  /// Collective: yes, over `group`. Blocks: host. Cost: a comparison as at construction, and one of
  ///   the order of the buckets.
  void rebind(const GroupArg& group = {}, CommHook hook = {});

  /// Averages the gradients of learnable tensors of no module with the model's: a policy's log_std,
  /// a temperature. They are treated as parameters: they get rank 0's values now, their gradients
  /// are sent in the buckets, and they are compared. Without find_unused_parameters, each averaged
  /// backward pass has to give them a gradient. The program saves them itself.
  ///
  /// Call it between two steps, before a sharded optimizer is made. May be called again for others.
  ///
  /// \param tensors  leaves that require a gradient, the same on every rank in shape and order.
  /// \throws c10::ValueError  for tensors that are no such leaves, and for parameters of the model.
  /// \throws c10::Error  as refresh().
  ///
  /// Collective: yes. Blocks: host. Cost: as refresh().
  void also_average(const std::vector<at::Tensor>& tensors);

  /// Throws where the ranks' models are no longer the same, bit for bit, and names the first
  /// parameter, buffer or value of an optimizer that differs, on which ranks, and by how much. Call
  /// it between steps. It finds values that were loaded on one rank only, a learning rate that
  /// follows the local loss, a parameter that one rank changed.
  ///
  /// Buffers are compared where passes broadcast rank 0's (broadcast_buffers), and where no rank
  /// had a forward pass in training mode whose averaged backward pass is still to come.
  ///
  /// \param optimizers  their options and state are compared as well, and the tensors of no module
  ///         that they step; the optimizer of step_in_backward always is.
  /// \throws c10::Error  with the same text on every rank, where models differ; in a backward pass
  ///         or a join(), on the rank that calls it there.
  ///
  /// Collective: yes. Blocks: host. Cost: reads every byte that it compares once (tensors on a GPU
  ///   are copied to the host), and exchanges a hash.
  void check_replicas(const std::vector<torch::optim::Optimizer*>& optimizers = {});

  /// Has passes of check_replicas_every and vote compare the options and the state of optimizers,
  /// too: a bit that changes there may change a parameter much later, or, by rounding, never.
  /// Replaces those of an earlier call; the optimizer of step_in_backward is always one with vote.
  ///
  /// \param optimizers  they outlive the last averaged backward pass, and are the same on every
  ///         rank.
  /// \throws c10::ValueError  for a null pointer, and for a ZeroRedundancyOptimizer, of whose state
  ///         each rank has another part.
  ///
  /// Collective: no, but every rank has to call it between the same two passes. Cost of such a
  ///   pass: reads the state once.
  void also_compare(std::vector<torch::optim::Optimizer*> optimizers);

  /// Replaces the averaging all-reduce of a bucket; see `CommHook` and `ddp::hooks`. Call it once,
  /// before the first backward pass, with the same hook on every rank.
  void register_comm_hook(CommHook hook);

  /// Steps the optimizer at the end of every averaged backward pass, bucket by bucket while later
  /// buckets are still being reduced, instead of `optimizer->step()` after it. The result is the
  /// same to the bit. Set it once, the same kind on every rank, and keep calling zero_grad() before
  /// backward.
  ///
  /// With find_unused_parameters or static_graph, and while kTuneBucketCap measures, buckets are
  /// stepped when all are reduced: the last one says which gradients are kept.
  ///
  /// For optimizers that update each parameter on its own, as LibTorch's do except LBFGS; a part of
  /// a step is a call of `step()` with part of the parameters. Not for programs that change the
  /// gradients before the step (clipping, a GradScaler). When a backward pass throws, some
  /// parameters may have been stepped, the same on every rank; over NCCL also with the gradients of
  /// the previous pass, if that was the one that failed. In a join() ranks without input step too,
  /// on the same gradients.
  ///
  /// \throws c10::ValueError  for LBFGS, which looks at all gradients together (its closure has to
  ///         return the loss averaged over the ranks, and step() runs it); for a
  ///         ZeroRedundancyOptimizer, which steps its part of all parameters (its overlap(true)
  ///         steps in backward); for an optimizer without any of the parameters.
  /// \throws c10::Error  when there is one already.
  void step_in_backward(std::shared_ptr<torch::optim::Optimizer> optimizer);

  /// Whether the program ends each averaged backward pass with finalize_backward(), so that what it
  /// does in between overlaps the reduction. Default: false
  ///
  /// \throws c10::Error  between a forward pass and the end of its averaged backward pass.
  ///
  /// Collective: no, but every rank has to set the same.
  void require_manual_backward_finalization(bool required);
  /// Whether it does.
  bool require_manual_backward_finalization() const;

  /// Whether finalize_backward() has to wait until the coming backward pass has returned. Ask after
  /// forward. False: it may also be called in a hook of that pass once all gradients are there.
  /// True until the buckets are final (one step or two), in a join() and with a MixedPrecision that
  /// has a param_dtype. False without require_manual_backward_finalization.
  bool should_finalize_after_backward() const;

  /// Waits for the gradients of an averaged backward pass, and makes `.grad` the averages; until
  /// then `.grad` is unspecified. Exactly once for each such pass, in the same order among
  /// collectives on every rank, before the next forward pass:
  /// ```
  /// model->require_manual_backward_finalization(true);
  /// loss.backward();
  /// step_embeddings();            // while gradients are on their way
  /// model->finalize_backward();
  /// optimizer.step();
  /// ```
  /// It throws what a backward pass throws else.
  ///
  /// \throws c10::Error  where require_manual_backward_finalization is not set; where no averaged
  ///         backward pass waits for it, as under no_sync(); inside a backward pass before all
  ///         gradients are there.
  ///
  /// Collective: yes, as the end of a backward pass. Blocks: host; over NCCL only the stream.
  void finalize_backward();

  /// Adds samples, or tokens, that this rank has trained or is about to train, for
  /// `stats().trained_per_second`. Once a batch, on the training thread.
  void count_trained(int64_t samples);

  /// The measurements so far: per step and per bucket; see `summary` and `write_trace`.
  ReductionStats stats() const;

  /// Gives a module that `snapshot()` made the current values of parameters and buffers, all of one
  /// moment between two steps of the optimizer.
  ///
  /// Collective: no. Cost: copies each parameter and buffer once; no memory where `copy` has the
  ///   same dtypes.
  /// Threads: with MixedPrecision any thread. A thread other than the training one waits until a
  ///   backward pass begins, whose thread waits for the copy, or until nothing has been trained for
  ///   half a second. Without MixedPrecision call it between two steps, while no other thread
  ///   trains.
  /// \throws c10::ValueError  `copy` has other names or shapes than the wrapped module.
  void update_snapshot(torch::nn::Module& copy) const;

  /// The values of tensors of the module, all of one moment, for code that saves them; threads as
  /// update_snapshot(). On the training thread they share the tensors' memory.
  std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) const;

  /// torch::nn::Module. Writes the wrapped module's own names, so the file loads into a plain one.
  ///
  /// Collective: no. One rank is enough: replicas are equal. Threads: as update_snapshot().
  void save(torch::serialize::OutputArchive& archive) const override;

  /// torch::nn::Module. Reads files of the plain module and of a wrapped one, also files whose
  /// names begin with "module.".
  ///
  /// Collective: no. Every rank has to load the same file, or rank 0 alone before refresh().
  void load(torch::serialize::InputArchive& archive) override;

  /// torch::nn::Module. A copy of the wrapped module without the wrapper: it has parameters and
  /// buffers of its own with the current values, and does not communicate. `snapshot()` keeps the
  /// type.
  ///
  /// \param device  of the copy; unset: the module's.
  /// \throws c10::Error  where the wrapped module is no torch::nn::Cloneable.
  ///
  /// Collective: no. Cost: copies each parameter and buffer once, and with MixedPrecision twice.
  /// Threads: as update_snapshot().
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

  /// torch::nn::Module. Clears all gradients that are averaged, including those of also_average(),
  /// and this rank's parts if a ZeroRedundancyOptimizer of stage 2 divides the gradients.
  void zero_grad(bool set_to_none = true) override;

  /// ShardedModule. The layouts of the wrapped module, replicated over the group.
  std::vector<ParameterLayout> layouts() override;
  /// ShardedModule. That a ZeroRedundancyOptimizer of stage 2 has the gradients.
  std::string clipping_error() const override;
  /// ShardedModule. True.
  bool is_transparent() const override { return true; }

  /// How gradients are averaged, as the options say.
  Reduction reduction() const;

  class State;

 protected:
  /// See DistributedDataParallel.
  DistributedDataParallelBase(
      std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options);

  /// As run().
  ///
  /// \param samples  of the batch, where an argument has a number of rows.
  template <typename Function>
  decltype(auto) run_pass(std::optional<int64_t> samples, Function&& function) {
    using Result = decltype(function());
    RECORD_FUNCTION("DistributedDataParallel.forward", c10::ArrayRef<const c10::IValue>());
    before_forward(samples);
    try {
      enter_forward();
      if constexpr (std::is_void_v<Result>) {
        function();
        after_forward();
      } else {
        Result result = function();
        std::vector<at::Tensor> outputs;
        const bool complete = for_each_tensor(
            std::as_const(result), [&](const at::Tensor& t) { outputs.push_back(t); });
        after_forward(std::move(outputs), complete);
        return static_cast<Result>(std::forward<Result>(result));
      }
    } catch (...) {
      forward_failed();
      throw;
    }
  }
  /// Notes the arguments of the coming forward pass, where they are compared with other ranks'.
  template <typename... Arguments>
  void note_inputs(const Arguments&... arguments) {
    if (!wants_inputs()) return;
    std::vector<at::Tensor> tensors;
    const TensorSink sink = [&](const at::Tensor& t) { tensors.push_back(t); };
    (for_each_tensor(arguments, sink), ...);
    note_input_tensors(tensors);
  }
  /// Says that the coming forward pass has arguments that another rank can repeat.
  ///
  /// \return  whether to note them.
  bool offer_call();
  /// Notes them.
  void note_call(detail::CallArguments arguments, detail::RepeatCall repeat);
  /// Whether run_pass() needs the number of samples.
  bool counts_samples() const;
  /// The device and dtype of tensor arguments of `forward`.
  const detail::InputPlacement& input_placement() const;

 private:
  friend class ZeroRedundancyOptimizerBase;

  void sync_outputs(std::vector<at::Tensor> outputs, bool outputs_complete);
  bool wants_inputs() const;
  void note_input_tensors(const std::vector<at::Tensor>& tensors);
  void before_forward(std::optional<int64_t> samples);
  void enter_forward();
  /// \param outputs_complete  whether `outputs` has all tensors that forward returned.
  void after_forward(std::vector<at::Tensor> outputs = {}, bool outputs_complete = false);
  /// Call it while forward's exception is handled.
  void forward_failed() noexcept;
  /// Throws where a forward pass broke a rule of the wrapped module's kind.
  virtual void check_forward() const {}

  std::unique_ptr<State> state_;
};

}  // namespace ddp
