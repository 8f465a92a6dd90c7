#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// Options for `ColumnParallelLinear`.
struct ColumnParallelLinearOptions {
  /// These sizes, and the defaults of all other options.
  ColumnParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  /// Of the whole layer.
  TORCH_ARG(int64_t, in_features);
  /// Of the whole layer; a multiple of partitions times the group's size.
  TORCH_ARG(int64_t, out_features);
  /// Whether it has one.
  TORCH_ARG(bool, bias) = true;
  /// Whether forward() returns the whole output on every rank, and not this rank's features.
  TORCH_ARG(bool, gather_output) = false;
  /// How many matrices lie one below the other in the weight: 3 for queries, keys and values. Each
  /// is cut by itself.
  TORCH_ARG(int64_t, partitions) = 1;
  /// Whether the input is cut along its first dimension, and gathered in forward().
  TORCH_ARG(bool, sequence_parallel) = false;
  /// The ranks that have a part of the layer each. Default: the default group.
  TORCH_ARG(GroupArg, process_group) = {};
};

/// A linear layer whose output features are cut over a group.
///
/// The ranks draw the values that torch::nn::Linear would draw, from the default generator, and
/// keep their rows of them: the layer is the whole one, cut, and the generator goes on from the
/// same state. So it must be in the same state on all ranks.
///
/// \par forward
/// \param input  [..., in_features], the same on all ranks. With sequence_parallel [T / W, ...,
///        in_features]: this rank's part of T.
/// \return  [..., out_features / W], or [..., out_features] with gather_output.
///
/// Collective: the constructor, forward where it gathers, and backward: an all-reduce of the
/// input's gradient; with sequence_parallel an all-gather and a reduce-scatter. Each needs the same
/// calls on all ranks of the group. Blocks: host, in backward after the weight's gradient. Memory:
/// with sequence_parallel, backward gathers the input again, beside the whole input's gradient.
/// torch::save() and save_state_dict() write this rank's part; a Checkpointer saves the whole.
/// Source: Megatron-LM, core/tensor_parallel/layers.py.
class DDP_API ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl>,
                                         public ShardedModule {
 public:
  /// These sizes, and the defaults of all other options.
  ColumnParallelLinearImpl(int64_t in_features, int64_t out_features)
      : ColumnParallelLinearImpl(ColumnParallelLinearOptions(in_features, out_features)) {}
  /// \throws c10::ValueError  for sizes that do not divide. c10::Error on every rank if the ranks
  ///         drew different values.
  explicit ColumnParallelLinearImpl(const ColumnParallelLinearOptions& options);
  /// Cuts values that this rank has, and draws none.
  ///
  /// \param weight  [out_features, in_features]. \param bias  [out_features], or undefined.
  ColumnParallelLinearImpl(
      const ColumnParallelLinearOptions& options, const at::Tensor& weight, const at::Tensor& bias);

  /// torch::nn::Cloneable. For clone().
  void reset() override;
  /// torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;
  /// See the class.
  at::Tensor forward(const at::Tensor& input);
  std::vector<ParameterLayout> layouts() override;

  /// What it was made with.
  ColumnParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features / W, in_features]
  at::Tensor bias;    ///< [out_features / W], or undefined

 private:
  void check_options();
  void cut(const at::Tensor& whole_weight, const at::Tensor& whole_bias);
};
TORCH_MODULE(ColumnParallelLinear);

/// Options for `RowParallelLinear`.
struct RowParallelLinearOptions {
  /// These sizes, and the defaults of all other options.
  RowParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  /// Of the whole layer; a multiple of the group's size.
  TORCH_ARG(int64_t, in_features);
  /// Of the whole layer.
  TORCH_ARG(int64_t, out_features);
  /// Whether it has one.
  TORCH_ARG(bool, bias) = true;
  /// Whether the input is this rank's features, as of a ColumnParallelLinear, and not the whole
  /// one.
  TORCH_ARG(bool, input_is_parallel) = true;
  /// Whether the output is cut along its first dimension.
  TORCH_ARG(bool, sequence_parallel) = false;
  /// The ranks that have a part of the layer each. Default: the default group.
  TORCH_ARG(GroupArg, process_group) = {};
};

/// A linear layer whose input features are cut over a group.
///
/// Its values are those of torch::nn::Linear, as ColumnParallelLinear's. Every rank has the whole
/// bias, which is added once, after the ranks' results are summed.
///
/// \par forward
/// \param input  [..., in_features / W], or [..., in_features] without input_is_parallel.
/// \return  [..., out_features], the same on all ranks; with sequence_parallel [T / W, ...,
///        out_features]: this rank's part of T.
///
/// Collective: the constructor and forward: an all-reduce of the output; with sequence_parallel a
/// reduce-scatter, and in backward an all-gather, and an all-reduce of the bias' gradient. Blocks:
/// host. Saved as a ColumnParallelLinear.
/// Source: Megatron-LM, core/tensor_parallel/layers.py.
class DDP_API RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl>,
                                      public ShardedModule {
 public:
  /// These sizes, and the defaults of all other options.
  RowParallelLinearImpl(int64_t in_features, int64_t out_features)
      : RowParallelLinearImpl(RowParallelLinearOptions(in_features, out_features)) {}
  /// \throws  as ColumnParallelLinear's.
  explicit RowParallelLinearImpl(const RowParallelLinearOptions& options);
  /// As ColumnParallelLinear's.
  RowParallelLinearImpl(
      const RowParallelLinearOptions& options, const at::Tensor& weight, const at::Tensor& bias);

  /// torch::nn::Cloneable. For clone().
  void reset() override;
  /// torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;
  /// See the class.
  at::Tensor forward(const at::Tensor& input);
  std::vector<ParameterLayout> layouts() override;

  /// What it was made with.
  RowParallelLinearOptions options;
  at::Tensor weight;  ///< [out_features, in_features / W]
  at::Tensor bias;    ///< [out_features], or undefined

 private:
  void check_options();
  void cut(const at::Tensor& whole_weight, const at::Tensor& whole_bias);
};
TORCH_MODULE(RowParallelLinear);

/// Sums the gradients of a module's parameters over a group in each backward pass.
///
/// For what all ranks of the group have and each uses on its part of the input: a LayerNorm between
/// layers with sequence_parallel. Its gradients are parts of the sum, and without this the ranks'
/// values would drift apart.
///
/// \param module  whose parameters of now are marked; not again in a second call. A clone() of it
///         has other parameters; a wrapper's clone() marks them.
/// \param group  of the layers around it.
///
/// Collective: no; the backward pass is, with an all-reduce for each parameter.
DDP_API void mark_replicated_partial(torch::nn::Module& module, const GroupArg& group = {});

}  // namespace ddp
