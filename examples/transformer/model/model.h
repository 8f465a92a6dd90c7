#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/parameter_layout.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "../groups.h"
#include "../options.h"
#include "layers.h"
#include "table.h"

namespace transformer {

/// Attention and a feed-forward network, each after a layer norm and beside a residual connection
/// (Xiong et al., arXiv:2002.04745). Computes, and where nothing is cut names its parameters, as
/// Python's nn.TransformerEncoderLayer does with norm_first and GELU; C++'s has no norm_first.
struct BlockImpl : torch::nn::Module {
  BlockImpl(const Shape& shape, const Groups& groups);

  /// \param x  [T, N, width]: in C++ attention takes time first.
  at::Tensor forward(at::Tensor x);

  const Groups groups;
  Layer self_attn, linear1, linear2;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Dropout dropout;

 private:
  at::Tensor drop_hidden(const at::Tensor& hidden);
};
TORCH_MODULE(Block);

/// One of the parts of a model that follow each other.
struct Stage {
  int64_t index = 0;
  int64_t count = 1;

  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == count; }
  /// Whether it has this one of so many layers; earlier stages have one more where they differ.
  bool has(int64_t layer, int64_t layers) const;
};

/// Predicts each next character from the previous ones; or a stage of that.
struct LanguageModelImpl : torch::nn::Module, ddp::ShardedModule {
  /// Draws the values of all stages, in the same order, and keeps its own. So stages that are made
  /// with the same seed are parts of one model. Collective where `groups` cuts layers.
  ///
  /// \param cuts_blocks  makes each block, and the table of a stage, a unit of
  ///         FullyShardedDataParallel over `groups.data`.
  LanguageModelImpl(
      int64_t vocabulary, const Shape& shape, Groups groups = {}, bool cuts_blocks = false,
      Stage stage = {});

  /// Maps [N, T] int64 to logits [N, T, vocabulary], with T at most the context. Where groups cut,
  /// to this rank's part of both: whole_vocabulary() joins the last dimension. Between stages lies
  /// [T, N, width].
  ///
  /// Collective where they do.
  at::Tensor forward(const at::Tensor& x);
  /// The mean cross entropy of what the last stage returned, for characters [N, T]. Collective as
  /// forward().
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& target) const;

  /// Characters [N, T] with as many more as make T a length that the ranks of --cp can have parts
  /// of. No position attends to those after it.
  at::Tensor padded(const at::Tensor& characters) const;
  /// The logits of the character after the first `length`, [N, vocabulary], of what forward()
  /// returned for padded() ones. Collective as forward().
  at::Tensor last_logits(const at::Tensor& logits, int64_t length) const;

  /// Of a model that is not cut over --tp: as the only part of each parameter. A Checkpointer then
  /// saves it like the parts of several ranks, so that either loads where the other was saved.
  std::vector<ddp::ParameterLayout> layouts() override;

  c10::Device device() const { return parameters().front().device(); }

  const int64_t vocabulary;
  const Shape shape;
  const Groups groups;
  const Stage stage;
  TableLayer tokens;                        // on the first stage and the last one
  torch::nn::Embedding positions{nullptr};  // on the first stage
  std::vector<Layer> layers;
  torch::nn::LayerNorm norm{nullptr};  // on the last stage
  torch::nn::Dropout dropout;

 private:
  at::Tensor embed(const at::Tensor& characters);
};
TORCH_MODULE(LanguageModel);

}  // namespace transformer
