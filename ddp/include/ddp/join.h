#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace torch::optim {
class Optimizer;
}

namespace ddp {

class JoinContext;

/// Options for `join`; the same on every rank.
struct JoinOptions {
  /// False runs the body alone: for inputs that are known to be even. Default: true
  TORCH_ARG(bool, enable) = true;
  /// Divide gradients by the world size; false: by the number of ranks that still have input, so
  /// that the last inputs weigh as much as the first. No effect with a communication hook, which
  /// averages by itself. Default: true
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
  /// Throw on all ranks as soon as one has no input left, instead of continuing without it: for
  /// modules that communicate in their forward pass (SyncBatchNorm). Default: false
  TORCH_ARG(bool, throw_on_early_termination) = false;
  /// Optimizers whose state is copied from the last rank with input to all ranks when the join
  /// ends: a rank with less input has taken fewer steps. The same ones in the same order on every
  /// rank. Learning rates and other options are copied too, but not a scheduler's count of steps:
  /// call the scheduler once an epoch. Not needed with `step_in_backward`, and an error for a
  /// ZeroRedundancyOptimizer, which is one of the objects of the join. Default: none
  TORCH_ARG(std::vector<torch::optim::Optimizer*>, optimizers) = {};
};

/// Runs in place of one collective object on a rank that has no input left.
class DDP_API JoinHook {
 public:
  virtual ~JoinHook() = default;

  /// Runs the collectives of one iteration of the ranks that still have input. Called once for each
  /// of their iterations.
  virtual void main_hook() {}

  /// Called when no rank has input left; on every rank, including those with the most input.
  ///
  /// \param is_last_joiner  whether this rank was among those with the most input: they hold the
  ///        results of the whole training.
  virtual void post_hook(bool is_last_joiner) { (void)is_last_joiner; }
};

/// An object whose iterations communicate, and which provides a JoinHook for ranks without input:
/// DistributedDataParallel, or a class of yours.
///
/// A class of yours calls `notify_join(*this)` in each iteration, before it communicates.
class DDP_API Joinable {
 public:
  virtual ~Joinable() = default;

  /// Makes the hook that runs in place of this object once this rank has no input left.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// The device of the join's own small tensors.
  virtual c10::Device join_device() const = 0;
  /// The group of the join; the same for all objects of one join.
  virtual ProcessGroup join_process_group() const = 0;

 protected:
  /// The running join of this object; null outside of one.
  JoinContext* join_context() const { return join_context_; }

 private:
  friend class JoinContext;
  friend void notify_join(Joinable& joinable);

  JoinContext* join_context_ = nullptr;
};

/// Sends the other ranks that this rank begins an iteration of `joinable`, and checks that they do.
/// Does nothing outside of a join.
///
/// \throws c10::Error  with throw_on_early_termination, when a rank has no input left; when ranks
///         with input are at different places: in an iteration of another object, or a pass.
///
/// Collective: yes, one all-reduce of 16 bytes a rank. Blocks: host.
DDP_API void notify_join(Joinable& joinable);

/// Runs `body`, the training loop over this rank's own inputs, and then joins the collectives of
/// the ranks with more input, until no rank has input left. Then all ranks hold the model of the
/// last one.
///
/// Example:
/// ```
/// ddp::join({model.get()}, [&] {
///   for (auto& batch : *loader) { ... model->forward(...) ... }
/// });
/// ```
/// \param joinables  at least one, each once: all objects that communicate in `body`, in the same
///        order on every rank. `body` may use them in any order and as often as it likes, as long
///        as averaged backward passes, sharded optimizers' steps and iterations of the user's own
///        classes have the same order on all ranks that have input: a rank without input joins them
///        in that order. If a rank with input leaves one out, all ranks throw. Forward passes need
///        not match, except with throw_on_early_termination: then a forward pass without its
///        backward pass is an error, too.
/// \throws c10::ValueError  for no joinable, joinables of different process groups, or a
///         ZeroRedundancyOptimizer in optimizers().
/// \throws c10::Error  with throw_on_early_termination, on all ranks, when one exhausts its input;
///         when ranks with input communicate in different orders; in the first averaged backward
///         pass of a model of this group that is not listed; for a join in the body of another one
///         of this group.
/// An exception of `body` is passed on. The other ranks throw too, with its text.
///
/// Collective: yes. Cost: an all-reduce of 16 bytes a rank in each averaged backward pass, step of
///   a sharded optimizer and iteration of a class of the user's own, and with
///   throw_on_early_termination in each training forward pass. Of several models in one backward
///   pass, all but the first send their gradients when autograd is done. At the end, the joinables'
///   own exchange (DistributedDataParallel broadcasts the model once).
/// Source: torch.distributed.algorithms.Join, torch 2.11.0.
DDP_API void join(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body,
    const JoinOptions& options = {});

namespace detail {

/// Whether this thread is in the body of a join() that continues when ranks have no input left.
/// Such ranks do not run the collectives of a module's forward.
DDP_API bool in_uneven_join();

}  // namespace detail

}  // namespace ddp
