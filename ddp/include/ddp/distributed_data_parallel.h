#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <ddp/comm_hooks.h>
#include <ddp/detail/wrappable.h>
#include <ddp/export.h>
#include <ddp/join.h>
#include <ddp/mixed_precision.h>
#include <ddp/move_tensors.h>
#include <ddp/output_tensors.h>
#include <ddp/process_group.h>
#include <ddp/reduction_stats.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

namespace ddp {

class ZeroRedundancyOptimizerBase;

/// As a bucket cap: measure the first steps, and choose the cap with the least predicted step time.
constexpr double kTuneBucketCap = std::numeric_limits<double>::lowest();

/// What a gradient becomes, of what it was on each rank.
enum class Reduction {
  /// The mean over ranks, each rank weighing the same: right where batches have equal sizes and the
  /// loss is a mean over the batch.
  Mean,
  /// The sum over ranks: for a loss that is a sum over the batch.
  Sum,
  /// The mean over ranks, each weighing as many samples as it had since the last averaged backward
  /// pass: the gradient of one process over all samples also where batches differ in size, for a
  /// loss that is a mean over the batch. A forward pass has as many samples as its first tensor
  /// argument has rows; see `count_samples`. Costs one small all-reduce a backward pass.
  SampleWeighted,
};

/// Options for `DistributedDataParallel`, named as Python's arguments.
///
/// Example:
/// ```
/// ddp::DistributedDataParallel model(
///     net, ddp::DistributedDataParallelOptions().bucket_cap_mb(10).gradient_as_bucket_view(true));
/// ```
struct DistributedDataParallelOptions {
  /// The ranks to train with. Default: the default group
  TORCH_ARG(ProcessGroup, process_group) = {};
  /// The one CUDA device this rank's module lives on; arguments of `forward` are moved there:
  /// tensors, and copies of vectors, arrays, pairs, tuples, maps and optionals of them and of types
  /// with a `move_tensors` (see move_tensors.h), nested in any way (what `forward` writes into such
  /// an argument is lost).
  /// Default: none, arguments stay where they are
  TORCH_ARG(std::vector<c10::Device>, device_ids) = {};
  /// Broadcast rank 0's buffers (BatchNorm's statistics) with each averaged backward pass, at whose
  /// end all ranks have them. Buffers that a program changes between steps travel with the next
  /// one; `sync_buffers()` shares them at once. False: each rank keeps its own. Default: true
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// Compare the ranks' models at construction, and broadcast rank 0's parameters, and its buffers
  /// where broadcast_buffers is set. Default: true
  TORCH_ARG(bool, init_sync) = true;
  /// Soft size of a gradient bucket in MiB (2^20 bytes): a bucket is full when it reaches it.
  /// kTuneBucketCap measures the first seven reduced steps (with static_graph eight), in which
  /// everything is sent behind backward, in one piece for each dtype, and takes the size with the
  /// least predicted step time; `stats()` tells.
  /// It is for dense gradients on CPUs without a communication hook, and changes nothing on one
  /// rank. Default: unset, 1 MiB for the bucket that is ready first and 25 MiB for the others
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = {};
  /// Soft sizes of the first, second, ... bucket in MiB, the last repeating; instead of
  /// bucket_cap_mb. Default: none
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// What gradients become: mean over ranks, sum, or weighted by samples. Default: Mean
  TORCH_ARG(Reduction, reduction) = Reduction::Mean;
  /// Let a backward pass skip parameters: one that no rank used keeps its gradient as it was, one
  /// that some ranks used gets the average with zeros from the others. A gradient penalty with a
  /// backward pass of its own needs it. Default: false
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Let `.grad` share the buckets' memory for good: its memory stays the same from pass to pass.
  /// Without, each gradient has memory of its own. Default: false
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Every iteration uses the same parameters, each as often as in the first. Allows parameters
  /// that a rank never uses and ones that get several gradients in one backward pass (reentrant
  /// checkpointing) without looking for them each time. The first reduced backward pass only counts
  /// gradients, and is reduced at its end. Default: false
  TORCH_ARG(bool, static_graph) = false;
  /// Take the times of the first ten steps (17 with kTuneBucketCap) and then of every so many, for
  /// `stats()`; 0: of none. Default: 100
  TORCH_ARG(int64_t, stats_every) = 100;
  /// Compare a hash of the ranks' parameters with the first averaged backward pass, also after a
  /// refresh(), and with every so many, which throw as `check_replicas()` does where they differ;
  /// 0: with none. In a join() with the first alone. Cost: reads every byte of the parameters then,
  /// and one all-reduce of 16 bytes; of the first one, no communication of its own. Default: unset,
  /// with the first alone, unless init_sync is false
  TORCH_ARG(std::optional<int64_t>, check_replicas_every) = {};
  /// Full names of parameters and buffers ("block.0.weight") that this rank keeps for itself:
  /// neither compared, broadcast nor averaged. Default: none
  TORCH_ARG(std::vector<std::string>, parameters_to_ignore) = {};
  /// Parameters, forward and the average in 16 bits, with float32 for the optimizer. Ignored
  /// parameters and buffers stay as they are. Default: all as the module has it
  TORCH_ARG(MixedPrecision, mixed_precision) = {};
};

/// While it lives, backward passes accumulate gradients on this rank only. The `forward` whose
/// backward shall not communicate has to happen inside. Guards may be nested; each restores what
/// it found. Must not outlive its model.
class [[nodiscard]] NoSyncGuard {
 public:
  /// `no_sync()` makes it.
  explicit NoSyncGuard(bool& gradient_sync)
      : gradient_sync_(gradient_sync), previous_(std::exchange(gradient_sync, false)) {}
  ~NoSyncGuard() { gradient_sync_ = previous_; }
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  bool& gradient_sync_;
  bool previous_;
};

/// What does not depend on the wrapped type.
class DDP_API DistributedDataParallelBase : public torch::nn::Module, public Joinable {
 public:
  ~DistributedDataParallelBase() override;

  /// Accumulates gradients without communication while the guard lives:
  /// ```
  /// { auto guard = model->no_sync(); model->forward(a).sum().backward(); }
  /// model->forward(b).sum().backward();   // averages the gradients of a and b
  /// ```
  NoSyncGuard no_sync();

  /// Trains on this rank's own inputs in `body`, and goes on beside the others when those are used
  /// up: `ddp::join` for this model alone.
  ///
  /// In `body`, every averaged backward pass counts. Forward passes without one, and those under
  /// no_sync(), are each rank's own affair. A rank whose input ends while it accumulates still adds
  /// what it accumulated to the next average.
  void join(const std::function<void()>& body, const JoinOptions& options = {}) {
    ddp::join({this}, body, options);
  }

  /// The coming forward pass has so many samples, for Reduction::SampleWeighted.
  void count_samples(int64_t samples);

  /// Joinable.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  ProcessGroup join_process_group() const override;

  /// Gives all ranks rank 0's buffers now. Between steps that is needed only for buffers that the
  /// program itself changed.
  ///
  /// Collective: yes. Blocks: host.
  void sync_buffers();

  /// Looks at the wrapped module anew: takes in parameters that were added, replaced, removed,
  /// frozen, unfrozen or moved since it was wrapped, or got data of another shape or dtype
  /// (set_data), and gives all ranks rank 0's values, as construction does (unless init_sync is
  /// false). Between two steps: gradients that were accumulated stay where they still fit their
  /// parameter, forward passes are forgotten. An optimizer gets no parameter by it, and keeps its
  /// state of one whose shape has changed: that is the program's to grow, or to erase.
  /// `stats()` begins anew.
  ///
  /// Collective: yes. Blocks: host. Cost: as construction.
  /// \throws c10::Error  as construction, with the same text on every rank; and inside a backward
  ///         pass or a join().
  void refresh();

  /// Averages the gradients of learnable tensors of no module with the model's: a policy's log_std,
  /// a temperature. They take part in all that parameters take part in: they get rank 0's values
  /// now, travel in the buckets, and are compared. Each averaged backward pass gives them a
  /// gradient, where find_unused_parameters is not set. The program saves them itself.
  ///
  /// Between two steps, before a sharded optimizer is made. May be called again for others.
  ///
  /// \param tensors  leaves that require a gradient, the same on every rank in shape and order.
  /// \throws c10::ValueError  for others, and for parameters of the model.
  /// \throws c10::Error  as refresh().
  ///
  /// Collective: yes. Blocks: host. Cost: as refresh().
  void also_average(const std::vector<at::Tensor>& tensors);

  /// Throws where the ranks' models are no longer the same, bit for bit, and names the first
  /// parameter, buffer or value of an optimizer that differs, on which ranks, and by how much. Call
  /// it between steps: what was loaded on one rank only, a learning rate that follows the local
  /// loss, a parameter that a rank changed by itself.
  ///
  /// Buffers are compared where rank 0's are broadcast (broadcast_buffers), and where no rank had
  /// a forward pass in training mode whose averaged backward pass is still to come.
  ///
  /// \param optimizers  whose options and state are compared as well, and the tensors of no module
  ///         that they step; that of step_in_backward always is.
  /// \throws c10::Error  with the same text on every rank, where they differ; in a backward pass
  ///         or a join(), on the rank that calls it there.
  ///
  /// Collective: yes. Blocks: host. Cost: reads every byte of what it compares once (what is on
  ///   a GPU is copied to the host), and exchanges a hash.
  void check_replicas(const std::vector<torch::optim::Optimizer*>& optimizers = {});

  /// Replaces the averaging all-reduce of a bucket; see `CommHook` and `ddp::hooks`. Once, before
  /// the first backward pass, and the same on every rank.
  void register_comm_hook(CommHook hook);

  /// Steps the optimizer at the end of every averaged backward pass, bucket by bucket while later
  /// buckets are still on their way, instead of `optimizer->step()` behind it: to the bit the same.
  /// Set it once, the same kind on every rank, and go on calling zero_grad() before backward.
  ///
  /// With find_unused_parameters or static_graph, and while kTuneBucketCap measures, every bucket
  /// is stepped when all are back: the last one says which gradients stay as they were.
  ///
  /// For optimizers that update each parameter on its own, as LibTorch's but LBFGS do; a part of a
  /// step is a call of `step()` with part of the parameters. Not where something is to happen to
  /// the gradients in between (clipping, a GradScaler). When a backward pass throws, some
  /// parameters may have been stepped, the same on every rank; over NCCL also with the gradients
  /// of the pass before, where that was the one that failed. In a join() ranks without input step
  /// as well, on the same gradients.
  ///
  /// \throws c10::ValueError  for LBFGS, which looks at all gradients together (its closure has to
  ///         return the loss averaged over the ranks, and step() runs it); for an optimizer without
  ///         any of the parameters.
  /// \throws c10::Error  when there is one already.
  void step_in_backward(std::shared_ptr<torch::optim::Optimizer> optimizer);

  /// What was measured so far: per step and per bucket; see `summary` and `write_trace`.
  ReductionStats stats() const;

  /// Gives a module that `snapshot()` made the values that parameters and buffers have now, all of
  /// one moment between two steps of the optimizer.
  ///
  /// Collective: no. Cost: copies each parameter and buffer once; no memory where `copy` has the
  ///   same dtypes.
  /// Threads: with MixedPrecision any one. On another than that which trains it waits until a
  ///   backward pass begins, whose thread waits for the copy, or until nothing has been trained for
  ///   half a second. Without MixedPrecision call it between two steps, where no other thread
  ///   trains.
  /// \throws c10::ValueError  `copy` has other names or shapes than the wrapped module.
  void update_snapshot(torch::nn::Module& copy) const;

  /// The values of tensors of the module, all of one moment, and as update_snapshot() for another
  /// thread; for what saves them. On the thread that trains they share the tensors' memory.
  std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) const;

  /// torch::nn::Module. Writes the wrapped module's own names, so the file loads into a plain one.
  ///
  /// Collective: no. One rank is enough: replicas are equal. Threads: as update_snapshot().
  void save(torch::serialize::OutputArchive& archive) const override;

  /// torch::nn::Module. Takes files of the plain module and of a wrapped one, also those whose
  /// names begin with "module.".
  ///
  /// Collective: no. Every rank has to load the same file, or rank 0 alone before refresh().
  void load(torch::serialize::InputArchive& archive) override;

  /// torch::nn::Module. A copy of the wrapped module, without the wrapper: parameters and buffers
  /// of its own, with the values of these, and no communication. `snapshot()` keeps the type.
  ///
  /// \param device  where the copy is; unset: where the module is.
  /// \throws c10::Error  where the wrapped module is no torch::nn::Cloneable.
  ///
  /// Collective: no. Cost: copies each parameter and buffer once, and with MixedPrecision twice.
  /// Threads: as update_snapshot().
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

  /// torch::nn::Module. Clears all gradients that are averaged, with those of also_average(), and
  /// this rank's parts where a ZeroRedundancyOptimizer of stage 2 has divided them.
  void zero_grad(bool set_to_none = true) override;

  class State;

 protected:
  /// See DistributedDataParallel.
  DistributedDataParallelBase(
      std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options);

  /// \param samples  of the batch, where an argument tells.
  void before_forward(std::optional<int64_t> samples);
  /// The module's own forward begins; after_forward() or forward_failed() follows.
  void enter_forward();
  /// \param outputs_complete  whether `outputs` are all tensors of what forward returned.
  void after_forward(std::vector<at::Tensor> outputs = {}, bool outputs_complete = false);
  /// Whether before_forward() wants to know.
  bool counts_samples() const;
  /// To be called while forward's exception is handled.
  void forward_failed() noexcept;
  /// What becomes of tensor arguments of `forward`.
  const detail::InputPlacement& input_placement() const;

 private:
  friend class ZeroRedundancyOptimizerBase;

  std::unique_ptr<State> state_;
};

namespace detail {

/// An argument on its way to the module's `forward`, with its value category: itself, or where it
/// holds tensors a copy on the module's device and in its precision.
template <typename T>
class ForwardArgument {
 public:
  ForwardArgument(T argument, const InputPlacement& placement)
      : argument_(static_cast<T>(argument)), placement_(placement) {}

  const std::remove_reference_t<T>& value() const { return argument_; }

  /// Once.
  T get() {
    if constexpr (can_move<Value>) {
      if (placement_.changes_inputs()) {
        moved_ = placement_.placed(static_cast<const Value&>(argument_));
        return static_cast<T>(*moved_);
      }
    }
    return static_cast<T>(argument_);
  }

 private:
  using Value = std::decay_t<T>;
  struct Nothing {};

  T argument_;  // a reference
  const InputPlacement& placement_;
  std::conditional_t<can_move<Value>, std::optional<Value>, Nothing> moved_;
};

/// How many samples a batch has: the size of the first dimension of the first tensor among the
/// arguments, or in a container that is the first argument.
template <typename... Arguments>
std::optional<int64_t> rows_of_first_tensor(const Arguments&... arguments) {
  std::optional<int64_t> rows;
  const TensorSink sink = [&](const at::Tensor& t) {
    if (!rows && t.defined() && t.dim() > 0) rows = t.size(0);
  };
  (for_each_tensor(arguments, sink), ...);
  return rows;
}

}  // namespace detail

/// What a `DistributedDataParallel` holds; `->` leads here.
template <typename M>
class DistributedDataParallelImpl : public DistributedDataParallelBase {
  static_assert(
      !detail::is_any_module<M>,
      "DistributedDataParallel: an AnyModule hides its forward; wrap the module that it holds");
  static_assert(
      detail::is_wrappable<M> || detail::is_any_module<M>,
      "DistributedDataParallel: wrap a std::shared_ptr to the module, as std::make_shared<Net>() "
      "makes it, or a holder from TORCH_MODULE(Net)");
  static_assert(
      detail::has_forward<M>(), "DistributedDataParallel: the wrapped module has no forward");

 public:
  /// See DistributedDataParallel.
  explicit DistributedDataParallelImpl(M module, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(as_module(module), options), module_(std::move(module)) {}

  /// Same arguments and result as the module's own `forward`.
  ///
  /// Collective: no, but in a join() with throw_on_early_termination.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return forward_with(
        detail::ForwardArgument<Args&&>(std::forward<Args>(args), input_placement())...);
  }

  /// `clone()` with the type that was wrapped: a target network, or a copy for another thread that
  /// computes with it or saves it while this one trains. `update_snapshot()` gives it newer values.
  M snapshot(const std::optional<c10::Device>& device = std::nullopt) const {
    using Module = std::decay_t<decltype(*module_)>;
    return M(std::dynamic_pointer_cast<Module>(clone(device)));
  }

  /// The module that was wrapped. A backward pass through it, past the wrapper's `forward`, leaves
  /// each rank its own gradients.
  M& module() { return module_; }
  /// The same.
  const M& module() const { return module_; }

 private:
  static std::shared_ptr<torch::nn::Module> as_module(const M& module) {
    if constexpr (detail::is_shared_module<M>) {
      return module;
    } else if constexpr (detail::is_module_holder<M>) {
      return module.is_empty() ? nullptr : module.ptr();
    } else {
      return nullptr;  // one of the assertions above has said why
    }
  }

  template <typename... Arguments>
  decltype(auto) forward_with(Arguments... arguments) {
    using Result = decltype(module_->forward(arguments.get()...));
    RECORD_FUNCTION("DistributedDataParallel.forward", c10::ArrayRef<const c10::IValue>());
    before_forward(
        counts_samples() ? detail::rows_of_first_tensor(arguments.value()...) : std::nullopt);
    try {
      enter_forward();
      if constexpr (std::is_void_v<Result>) {
        module_->forward(arguments.get()...);
        after_forward();
      } else {
        Result result = module_->forward(arguments.get()...);
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

  M module_;
};

/// Trains replicas of a module on several ranks: every backward pass ends with the same averaged
/// gradients on all of them, communicated while it still runs.
///
/// A module holder over a module, like any other of LibTorch: `model->forward(...)`, `model(x)`,
/// `model->parameters()`, `model->train()`. The wrapped module is its child "module", so names in
/// its state read "module.fc.weight", as in Python; save `model->module()` for plain names.
///
/// \tparam M  a module holder (Net from TORCH_MODULE, torch::nn::Sequential, ...) or a
///         std::shared_ptr to a module; deduced.
/// \throws c10::ValueError  for an empty module, one without a parameter that requires a gradient,
///         parameters on several device types, unusable device_ids, an unknown name to ignore, or
///         bucket caps that are not positive.
/// \throws c10::Error  with the same text on every rank when the ranks' models or settings differ:
///         the first parameter or buffer that does, by name, with both ranks' shapes.
///
/// What `forward` returns is searched for tensors (`for_each_tensor`); a type of your own needs a
/// `visit_tensors` only for find_unused_parameters and for nested backward passes with
/// static_graph.
///
/// Which parameters take part is decided here: freeze them before, or call `refresh()` behind it. A
/// forward pass while all of them are frozen is not averaged, and works (a discriminator in the
/// generator's step). Wrap, then create the optimizer, or the other way round: parameters keep
/// their identity.
///
/// Collective: construction (unless init_sync is false), and the backward pass of each forward
///   outside no_sync(). Every rank has to do as many of both.
/// Threads: to be used from one thread.
/// Cost: construction sends each parameter and buffer once; a step, each gradient once.
/// Source: torch.nn.parallel.DistributedDataParallel, torch 2.11.0. Different from there: errors
///   of one rank come up on all, at the backward that caused them (over NCCL at the next one); the
///   handshake compares names, dtypes and buffers too; two forwards before a backward work with
///   BatchNorm.
template <typename M>
class DistributedDataParallel : public torch::nn::ModuleHolder<DistributedDataParallelImpl<M>> {
 public:
  /// What it holds.
  using Impl = DistributedDataParallelImpl<M>;
  // TORCH_MODULE cannot name a template, so the holder is written out once.
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// As `forward`. The holder's own cannot see through a `forward` that is a template.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

/// Lets the compiler find M.
template <typename M>
DistributedDataParallel(M) -> DistributedDataParallel<M>;
/// Lets the compiler find M.
template <typename M>
DistributedDataParallel(M, DistributedDataParallelOptions) -> DistributedDataParallel<M>;

}  // namespace ddp
