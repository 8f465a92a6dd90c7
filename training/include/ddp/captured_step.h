#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <ddp/export.h>

namespace ddp {

/// Options of a `CapturedStep`.
struct CapturedStepOptions {
  /// Steps that run as usual before the capture, at least 3: in the first ones the wrapper's
  /// buckets find their order. Default: 3
  TORCH_ARG(int64_t, warmup_steps) = 3;
  /// The optimizers that the step steps: one that cannot be captured is refused by name, and
  /// replays follow the rates of fused ones. The rates of others are frozen.
  TORCH_ARG(std::vector<torch::optim::Optimizer*>, optimizers) = {};
};

/// Captures a whole training step into a CUDA graph and replays it: the host then queues one graph
/// a step, instead of each kernel.
///
/// ```
/// const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
/// ddp::DistributedDataParallel model(net);
/// ddp::CapturedStep step([&] {
///   optimizer.zero_grad();
///   auto loss = loss_of(model->forward(x), y);
///   loss.backward();
///   optimizer.step();
///   return loss.detach();
/// }, ddp::CapturedStepOptions().optimizers({&optimizer}));
/// for (auto& batch : *loader) {
///   x.copy_(batch.data);
///   y.copy_(batch.target);
///   step();
/// }
/// ```
///
/// The inputs are the same tensors in every step, and the program copies each batch into them. What
/// the host computes in the step is frozen. The optimizers of `<ddp/optim.h>` read their count of
/// steps and their rates from the device: a rate that changes between two calls holds for the next.
/// A replay runs no code of the host.
///
/// A process group that ends releases the graph before: NCCL waits for graphs that hold its
/// collectives.
///
/// Threads: belongs to one.
class DDP_API CapturedStep {
 public:
  /// zero_grad, forward, backward and the optimizers' steps. \return  such as the loss: overwritten
  /// by each replay.
  using Step = std::function<at::Tensor()>;

  /// \throws c10::ValueError  for no function, for fewer than 3 warmup steps, and for an optimizer
  ///         that cannot be captured: LibTorch's Adam, AdamW, Adagrad and LBFGS, and ddp::optim's
  ///         that are not fused.
  explicit CapturedStep(Step step, const CapturedStepOptions& options = {});
  ~CapturedStep();
  C10_DISABLE_COPY_AND_ASSIGN(CapturedStep);

  /// Runs the step: as usual while it warms up, then captures it and replays that.
  ///
  /// \return  what the step returned; from the capture on always the same tensor.
  /// \throws c10::Error  where LibTorch was built without CUDA; for another stream than in the
  ///         first call, or the default one; after release(); for an optimizer whose options or
  ///         state have changed since the capture, but for the rate of a fused one; and if the step
  ///         does what a graph cannot hold, with the operation's name. Such a step has not run, and
  ///         runs without this class.
  ///
  /// Collective: as the step. Every rank warms up, captures and replays as often.
  at::Tensor operator()();

  /// Whether later calls replay.
  bool is_captured() const;

  /// Destroys the graph, after the device has run it. Later calls throw.
  void release();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
