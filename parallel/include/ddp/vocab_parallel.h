#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <vector>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// Options for `VocabParallelEmbedding`.
struct VocabParallelEmbeddingOptions {
  /// These sizes, and the defaults of all other options.
  VocabParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// V, of the whole table. Any number: the last rank's rows beyond V are padding.
  TORCH_ARG(int64_t, num_embeddings);
  /// Of the whole layer.
  TORCH_ARG(int64_t, embedding_dim);
  /// Whether the output is cut along its first dimension.
  TORCH_ARG(bool, sequence_parallel) = false;
  /// The ranks that have a part of the table each. Default: the default group.
  TORCH_ARG(GroupArg, process_group) = {};
};

/// An embedding whose rows are cut over a group: rank r has rows [r * R, (r + 1) * R) of the whole
/// table, with R = ceil(V / W).
///
/// Its values are those that torch::nn::Embedding draws, as ColumnParallelLinear's are Linear's.
/// Padding rows are zero, and never looked up.
///
/// As the head of a language model, its weight gives this rank's logits, for
/// vocab_parallel_cross_entropy():
///
///     auto logits = torch::linear(ddp::functional::copy_to_region(x, tp), embedding->weight);
///
/// \par forward
/// \param input  integers of at least 0 and below V, of any shape; the same on all ranks.
/// \return  [..., embedding_dim], the same on all ranks; with sequence_parallel [T / W, ...,
///        embedding_dim]: this rank's part of the first dimension.
/// \throws c10::ValueError  for another number, on CPUs.
///
/// Collective: the constructor and forward: an all-reduce of the output, or with sequence_parallel
/// a reduce-scatter and an all-gather in backward. Blocks: host. Saved as a ColumnParallelLinear,
/// without padding by a Checkpointer. Source: Megatron-LM,
/// core/tensor_parallel/layers.py.
class DDP_API VocabParallelEmbeddingImpl : public torch::nn::Cloneable<VocabParallelEmbeddingImpl>,
                                           public ShardedModule {
 public:
  /// These sizes, and the defaults of all other options.
  VocabParallelEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions(num_embeddings, embedding_dim)) {}
  /// \throws  as ColumnParallelLinear's.
  explicit VocabParallelEmbeddingImpl(const VocabParallelEmbeddingOptions& options);
  /// Cuts values that this rank has, and draws none.
  ///
  /// \param weight  [num_embeddings, embedding_dim].
  VocabParallelEmbeddingImpl(
      const VocabParallelEmbeddingOptions& options, const at::Tensor& weight);

  /// torch::nn::Cloneable. For clone().
  void reset() override;
  /// torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;
  /// See the class.
  at::Tensor forward(const at::Tensor& input);
  std::vector<ParameterLayout> layouts() override;

  /// What it was made with.
  VocabParallelEmbeddingOptions options;
  at::Tensor weight;  ///< [ceil(num_embeddings / W), embedding_dim]

 private:
  void check_options();
  void cut(const at::Tensor& whole);
};
TORCH_MODULE(VocabParallelEmbedding);

/// Options of vocab_parallel_cross_entropy().
struct VocabParallelCrossEntropyOptions {
  /// V without padding. Unset: the logits of all ranks, none of which is padding.
  TORCH_ARG(std::optional<int64_t>, num_classes) = {};
  /// Targets that have no loss.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// torch::kMean, kSum or kNone.
  TORCH_ARG(torch::nn::CrossEntropyLossOptions::reduction_t, reduction) = torch::kMean;
  /// How much of each target is spread over all classes, 0 to 1.
  TORCH_ARG(double, label_smoothing) = 0.0;
};

/// The cross entropy of logits that are cut over a group, which are gathered nowhere.
///
/// Equal to torch::nn::functional::cross_entropy of the whole logits, in float32 for half and
/// bfloat16.
///
/// \param logits  [..., R], this rank's part of the classes: as a VocabParallelEmbedding's rows.
/// \param target  [...], integers: classes below V, or ignore_index; the same on all ranks.
/// \return  the mean over targets that are not ignored, NaN if there are none; the sum; or [...].
///         The same on all ranks.
/// \throws c10::ValueError  for other shapes or options; on CPUs for a target that is no class.
///
/// Collective: yes: two all-reduces, of one and of two to three numbers a target; none in backward.
/// Blocks: host.
/// Source: Megatron-LM, core/tensor_parallel/cross_entropy.py.
DDP_API at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, const GroupArg& group = {},
    const VocabParallelCrossEntropyOptions& options = {});

}  // namespace ddp
