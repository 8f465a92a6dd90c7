#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <ddp/detail/running_statistics.h>
#include <ddp/detail/wrappable.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// As torch::nn::BatchNormOptions, and a group.
struct SyncBatchNormOptions {
  /// This number of features, and the defaults of all other options.
  /* implicit */ SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}

  /// C of an input [N, C] or [N, C, ...].
  TORCH_ARG(int64_t, num_features);
  /// Added to the variance, above 0.
  TORCH_ARG(double, eps) = 1e-5;
  /// How fast the running statistics follow; nullopt: the average of all batches so far.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether it has a weight and a bias.
  TORCH_ARG(bool, affine) = true;
  /// Whether it has running statistics; else evaluation takes the batch's.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks whose batches are normalized together. Default: the default group.
  TORCH_ARG(GroupArg, process_group) = {};
};

/// Batch normalization over the batches of all ranks, as if they were one: output, running
/// statistics and the gradient of the input are those of torch::nn::BatchNorm over the whole batch.
/// Gradients of weight and bias are the rank's own share, which the wrapper averages as all others.
///
/// Ranks may have batches of any size, an empty one too. Parameters and buffers have BatchNorm's
/// names, so that states load in both directions. Evaluation, a world of one, and a program without
/// a group compute what BatchNorm does.
///
/// \par forward
/// \param input  [N, C] to [N, C, D, H, W], in any memory format, float, double, half or bfloat16.
/// \throws c10::ValueError  on every rank: the whole batch has only one value a channel. c10::Error
///         another shape; a join without throw_on_early_termination, because ranks without input
///         cannot call forward.
/// Collective: forward in training (one all-gather of 2 C + 1 numbers), and its backward where the
///   input requires a gradient (one all-reduce of 2 C); under no_sync() too. Every rank has to call
///   both equally often. Within checkpoint() the all-gather is repeated.
/// Blocks: host, over NCCL the stream.
/// Source: torch.nn.SyncBatchNorm, torch 2.11.0. Different from there: it works on CPUs.
class DDP_API SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions>,
      public detail::HasRunningStatistics {
 public:
  /// \throws c10::ValueError  num_features below 1, eps not above 0, momentum outside of 0 to 1.
  explicit SyncBatchNormImpl(const SyncBatchNormOptions& options);

  /// Normalizes a batch; see the class.
  at::Tensor forward(const at::Tensor& input);
  /// torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;

  /// The group whose batches are normalized together; null for the default group.
  const ProcessGroup& process_group() const { return group_; }
  /// HasRunningStatistics.
  ProcessGroup statistics_group() const override;

 protected:
  /// \throws c10::Error  the input does not have this many dimensions.
  void check_dimensions(const at::Tensor& input, int64_t least, int64_t most) const;
  /// torch::nn::NormImplBase.
  void _check_input_dim(const at::Tensor& input) override;

 private:
  double next_momentum();
  /// The group to communicate in; null for none.
  ProcessGroup group_in_use() const;

  ProcessGroup group_;
};
/// The holder of a SyncBatchNormImpl.
TORCH_MODULE(SyncBatchNorm);

/// For an input [N, C] or [N, C, L].
class DDP_API SyncBatchNorm1dImpl : public SyncBatchNormImpl {
 public:
  using SyncBatchNormImpl::SyncBatchNormImpl;

 protected:
  /// torch::nn::NormImplBase.
  void _check_input_dim(const at::Tensor& input) override { check_dimensions(input, 2, 3); }
};
/// The holder of a SyncBatchNorm1dImpl.
TORCH_MODULE(SyncBatchNorm1d);

/// For an input [N, C, H, W].
class DDP_API SyncBatchNorm2dImpl : public SyncBatchNormImpl {
 public:
  using SyncBatchNormImpl::SyncBatchNormImpl;

 protected:
  /// torch::nn::NormImplBase.
  void _check_input_dim(const at::Tensor& input) override { check_dimensions(input, 4, 4); }
};
/// The holder of a SyncBatchNorm2dImpl.
TORCH_MODULE(SyncBatchNorm2d);

/// For an input [N, C, D, H, W].
class DDP_API SyncBatchNorm3dImpl : public SyncBatchNormImpl {
 public:
  using SyncBatchNormImpl::SyncBatchNormImpl;

 protected:
  /// torch::nn::NormImplBase.
  void _check_input_dim(const at::Tensor& input) override { check_dimensions(input, 5, 5); }
};
/// The holder of a SyncBatchNorm3dImpl.
TORCH_MODULE(SyncBatchNorm3d);

/// Replaces BatchNorm1d, 2d and 3d by SyncBatchNorm1d, 2d and 3d in a module, where they are
/// elements of a Sequential, at any depth. The replacements keep parameters (the same tensors, so
/// that optimizers stay valid), buffers and mode.
///
/// A member of a class, or an element of a ModuleList, is called by its own type, so that this
/// function cannot replace it, where Python's can: declare a SyncBatchNorm there.
///
/// \param module  not wrapped yet.
/// \return how many were converted.
/// \throws c10::ValueError  a BatchNorm that is no element of a Sequential, by name, or a wrapped
///         part; nothing is changed then.
DDP_API int64_t convert_sync_batchnorm(torch::nn::Module& module, const GroupArg& group = {});

/// The same of a holder, or of a shared_ptr.
template <typename M, std::enable_if_t<detail::is_wrappable<std::decay_t<M>>, int> = 0>
int64_t convert_sync_batchnorm(M& module, const GroupArg& group = {}) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module), group);
}

}  // namespace ddp
