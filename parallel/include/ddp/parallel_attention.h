#pragma once

#include <cstdint>
#include <ostream>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/parallel_linear.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// Options for `ParallelMultiheadAttention`.
struct ParallelMultiheadAttentionOptions {
  /// These sizes, and the defaults of all other options.
  ParallelMultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}

  /// Of the whole layer.
  TORCH_ARG(int64_t, embed_dim);
  /// A multiple of the group's size, and a divisor of embed_dim.
  TORCH_ARG(int64_t, num_heads);
  /// Whether it has one.
  TORCH_ARG(bool, bias) = true;
  /// Of the attention weights, in training.
  TORCH_ARG(double, dropout) = 0.0;
  /// Whether a position attends to those before it and itself alone.
  TORCH_ARG(bool, is_causal) = false;
  /// Whether input and output are cut along their first dimension.
  TORCH_ARG(bool, sequence_parallel) = false;
  /// The ranks that have some of the heads each. Default: the default group.
  TORCH_ARG(GroupArg, process_group) = {};
};

/// Self-attention whose heads are divided over a group.
///
/// A ColumnParallelLinear to queries, keys and values, attention over this rank's heads, and a
/// RowParallelLinear. Its values are those that torch::nn::MultiheadAttention draws, cut; outputs
/// are its outputs for a query that is key and value, too.
///
/// \par forward
/// \param input  [T, N, embed_dim], the same on all ranks; with sequence_parallel [T / W, N,
///        embed_dim].
/// \return  of the input's shape.
///
/// Collective: the constructor, forward and backward, as the two layers: one all-reduce each way.
/// Blocks: host.
class DDP_API ParallelMultiheadAttentionImpl
    : public torch::nn::Cloneable<ParallelMultiheadAttentionImpl> {
 public:
  /// These sizes, and the defaults of all other options.
  ParallelMultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : ParallelMultiheadAttentionImpl(ParallelMultiheadAttentionOptions(embed_dim, num_heads)) {}
  /// \throws c10::ValueError  for heads that do not divide. c10::Error on every rank if the ranks
  ///         drew different values.
  explicit ParallelMultiheadAttentionImpl(const ParallelMultiheadAttentionOptions& options);
  /// Cuts values that this rank has, and draws none.
  ///
  /// \param whole  of the same embed_dim, num_heads and bias.
  ParallelMultiheadAttentionImpl(
      const ParallelMultiheadAttentionOptions& options, const torch::nn::MultiheadAttention& whole);

  /// torch::nn::Cloneable. For clone().
  void reset() override;
  /// torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;
  /// See the class.
  at::Tensor forward(const at::Tensor& input);

  /// What it was made with.
  ParallelMultiheadAttentionOptions options;
  ColumnParallelLinear in_proj = nullptr;  ///< to queries, keys and values, in three partitions
  /// To the output, of all heads.
  RowParallelLinear out_proj = nullptr;

 private:
  void check_options();
  void cut(const torch::nn::MultiheadAttention& whole);
};
TORCH_MODULE(ParallelMultiheadAttention);

}  // namespace ddp
