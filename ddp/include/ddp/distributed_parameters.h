#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/distributed_data_parallel_base.h>
#include <ddp/distributed_data_parallel_options.h>
#include <ddp/export.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// The implementation of `DistributedParameters`.
class DDP_API DistributedParametersImpl : public DistributedDataParallelBase {
 public:
  /// Names, and tensors that are leaves; "scene.means" is "means" in "scene".
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// See DistributedParameters.
  explicit DistributedParametersImpl(
      const NamedTensors& tensors, const DistributedDataParallelOptions& options = {});
  /// Named "0", "1" and so on.
  explicit DistributedParametersImpl(
      const std::vector<at::Tensor>& tensors, const DistributedDataParallelOptions& options = {});

  using DistributedDataParallelBase::refresh;
  /// Goes on with other tensors in place of those that there are, in their order and with their
  /// names: with other shapes, or new leaves of the same. Between two steps, as refresh(). The
  /// program gives its optimizer the new tensors, and what of its state still fits them.
  ///
  /// \param tensors  as many as at construction.
  /// \throws c10::ValueError  for another number of them, and for tensors that are no leaves. Then
  ///         nothing has changed.
  ///
  /// Collective: yes. Blocks: host. Cost: as construction.
  void refresh(const std::vector<at::Tensor>& tensors);

 private:
  class Part;    // the tensors whose names begin with a prefix
  class Holder;  // all of them

  DistributedParametersImpl(
      std::shared_ptr<Holder> holder, const DistributedDataParallelOptions& options);

  const std::shared_ptr<Holder> holder_;
};

/// Trains tensors that are in no module, with all that DistributedDataParallel does: rank 0's
/// values at construction, gradients averaged in buckets while the backward pass runs, and its
/// members.
///
/// ```
/// ddp::DistributedParameters params({{"means", means}, {"scales", scales}});
/// torch::optim::Adam optimizer(params->parameters());
/// auto image = params->run([&] { return render(means, scales, camera); });
/// torch::mse_loss(image, photo).backward();       // averaged
/// optimizer.step();
/// ```
/// `run` is the forward pass: the backward pass through what it returns is averaged. A tensor that
/// the pass does not use needs find_unused_parameters(true). Tensors keep their identity. One
/// that requires no gradient gets rank 0's value, and is part of the state.
///
/// A ZeroRedundancyOptimizer takes it as a model; `save`, a Checkpointer and state files have the
/// tensors by name.
///
/// Collective: construction, and the backward pass of each `run` outside no_sync().
/// \throws c10::ValueError  at construction, for no tensors, one that is no leaf, a name twice, and
///         as DistributedDataParallel.
class DistributedParameters : public torch::nn::ModuleHolder<DistributedParametersImpl> {
 public:
  /// The implementation that the holder points to.
  using Impl = DistributedParametersImpl;

  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  /// \param tensors  the same on every rank in order, shapes and dtypes.
  explicit DistributedParameters(
      const std::vector<at::Tensor>& tensors, const DistributedDataParallelOptions& options = {})
      : torch::nn::ModuleHolder<Impl>(std::make_shared<Impl>(tensors, options)) {}
  /// \param tensors  with names, which may have dots.
  explicit DistributedParameters(
      const Impl::NamedTensors& tensors, const DistributedDataParallelOptions& options = {})
      : torch::nn::ModuleHolder<Impl>(std::make_shared<Impl>(tensors, options)) {}
};

}  // namespace ddp
