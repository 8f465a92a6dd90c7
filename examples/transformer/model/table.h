#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <ddp/vocab_parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "../groups.h"
#include "../options.h"

namespace transformer {

/// A vector for each character: the model's first layer, and its last one, whose logits are the
/// products of what it gets with all vectors (Press and Wolf, arXiv:1608.05859). The ranks of --tp
/// have some of the rows each; with --pp the first stage and the last one have the table.
struct TableImpl : torch::nn::Module, ddp::ShardedModule {
  /// Draws the whole table, whatever is cut. Collective where it is.
  TableImpl(int64_t vocabulary, const Shape& shape, const Groups& groups);

  /// \param x  characters, int64; as the head, vectors.
  /// \return  their vectors; as the head, logits, of which each rank of --tp gets as many. The last
  ///         rank's may be more than there are characters.
  at::Tensor forward(const at::Tensor& x, bool is_head);
  std::vector<ddp::ParameterLayout> layouts() override;

  const ddp::ProcessGroup tp;
  ddp::VocabParallelEmbedding cut{nullptr};  // where it is cut; no module of this one
  at::Tensor weight;
};
TORCH_MODULE(Table);

/// A table, which may be a unit of FullyShardedDataParallel.
struct TableLayer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> vectors, logits;
  at::Tensor weight;
};

/// \param is_unit  makes it one over `groups.data`. Collective then.
TableLayer make_table(int64_t vocabulary, const Shape& shape, const Groups& groups, bool is_unit);

/// The mean cross entropy of logits [n, own]. Collective where they are cut.
at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary, const Groups& groups);
/// Joins them to [..., vocabulary]. Collective where they are cut.
at::Tensor whole_vocabulary(const at::Tensor& logits, int64_t vocabulary, const Groups& groups);

}  // namespace transformer
