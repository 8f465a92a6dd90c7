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
  /// Whether anything happens at all; false when inputs are known to be even. Default: true
  TORCH_ARG(bool, enable) = true;
  /// Divide gradients by the world size; else by the number of ranks that still have input, so that
  /// the last inputs weigh as much as the first. A communication hook averages by itself, and does
  /// not see this. Default: true
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
  /// Throw on all ranks as soon as one has no input left, instead of going on without it: for
  /// modules that communicate in their forward pass (SyncBatchNorm). Default: false
  TORCH_ARG(bool, throw_on_early_termination) = false;
  /// Optimizers whose state all ranks take over from the last one with input when the join ends:
  /// one that had less input has taken fewer steps. The same ones in the same order on every rank.
  /// Learning rates and other options are taken over as well; a scheduler's own count of steps is
  /// not: call it once an epoch. Not needed where `step_in_backward` steps. Default: none
  TORCH_ARG(std::vector<torch::optim::Optimizer*>, optimizers) = {};
};

/// What one collective object does on a rank that has no input left.
class DDP_API JoinHook {
 public:
  virtual ~JoinHook() = default;

  /// Takes part in the collectives of one iteration of the ranks that still have input. Once for
  /// each of those.
  virtual void main_hook() {}

  /// When no rank has input left; on every rank, also where the inputs lasted to the end.
  ///
  /// \param is_last_joiner  whether this rank was among those with the most input: they hold the
  ///        results of the whole training.
  virtual void post_hook(bool is_last_joiner) { (void)is_last_joiner; }
};

/// An object whose iterations communicate, and which knows how to do without an iteration of its
/// own: DistributedDataParallel, or a class of yours.
///
/// A class of yours calls `notify_join(*this)` first thing in each iteration, before it
/// communicates.
class DDP_API Joinable {
 public:
  virtual ~Joinable() = default;

  /// Makes what stands in for this object once this rank has no input left.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// Where the join's own small tensors live.
  virtual c10::Device join_device() const = 0;
  /// The same for all that join together.
  virtual ProcessGroup join_process_group() const = 0;

 protected:
  /// The join that goes on around this object; null outside of one.
  JoinContext* join_context() const { return join_context_; }

 private:
  friend class JoinContext;
  friend void notify_join(Joinable& joinable);

  JoinContext* join_context_ = nullptr;
};

/// Says that this rank begins an iteration, and learns whether the others do. Does nothing outside
/// of a join.
///
/// \throws c10::Error  with throw_on_early_termination, when a rank has no input left; when ranks
///         with input are at different places: in an iteration of another object, or a pass.
///
/// Collective: yes, one all-reduce of 16 bytes a rank. Blocks: host.
DDP_API void notify_join(Joinable& joinable);

/// Runs `body`, the training loop over this rank's own inputs, and then takes part in what ranks
/// with more input still do, until no rank has any left: then all ranks hold the model of the last.
///
/// Example:
/// ```
/// ddp::join({model.get()}, [&] {
///   for (auto& batch : *loader) { ... model->forward(...) ... }
/// });
/// ```
/// \param joinables  at least one, each once; all that communicate in `body`, in the same order on
///        every rank. `body` may use them in any order and as often as it likes, as long as the
///        averaged backward passes, sharded optimizers' steps and iterations of the user's own
///        classes come in the same order on all ranks that have input: a rank without input takes
///        part in them in that order. A rank that leaves one out is an error on all ranks, but one
///        whose input ends. Forward passes are each rank's own, but with
///        throw_on_early_termination: then one that leaves out its backward pass is an error, too.
/// \throws c10::ValueError  for no joinable, or ones with different process groups.
/// \throws c10::Error  with throw_on_early_termination: on ranks without input that they exhausted
///         it, on the others that one did. When ranks with input communicate in different orders.
///         In the first averaged backward pass of a model of this group that is not listed; for a
///         join in the body of another one of this group.
/// An exception of `body` is passed on. The other ranks learn it and stop.
///
/// Collective: yes. Cost: a 16 bytes a rank all-reduce in each averaged backward pass, step of a
///   sharded optimizer and iteration of a class of the user's own, and with
///   throw_on_early_termination in each training forward pass. Of several models in one backward
///   pass, all but the first send their gradients when autograd is done. At the end what the
///   joinables exchange then (DistributedDataParallel broadcasts the model once).
/// Source: torch.distributed.algorithms.Join, torch 2.11.0.
DDP_API void join(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body,
    const JoinOptions& options = {});

}  // namespace ddp
