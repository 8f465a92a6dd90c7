#pragma once

#include <vector>

#include <ddp/parameter_layout.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "groups.h"
#include "layers.h"
#include "options.h"

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

/// Predicts each next character from the previous ones.
struct LanguageModelImpl : torch::nn::Module, ddp::ShardedModule {
  /// Collective where `groups` cuts layers.
  LanguageModelImpl(int64_t vocabulary, const Shape& shape, Groups groups = {});

  /// Maps [N, T] int64 to logits [N, T, vocabulary], with T at most the context. Where groups cut,
  /// to this rank's part of both: whole_vocabulary() joins the last dimension.
  ///
  /// Collective where they do.
  at::Tensor forward(const at::Tensor& characters);
  /// The logits of the character after [N, T], [N, vocabulary]. Collective as forward().
  at::Tensor predict_next(const at::Tensor& characters);

  /// Of a model that one rank has: as the only part of each parameter. A Checkpointer then saves it
  /// like the parts of several ranks, so that either loads where the other was saved.
  std::vector<ddp::ParameterLayout> layouts() override;

  c10::Device device() const { return positions->weight.device(); }

  const int64_t vocabulary;
  const Shape shape;
  const Groups groups;
  Layer tokens;
  torch::nn::Embedding positions;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
  Layer head;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(LanguageModel);

}  // namespace transformer
