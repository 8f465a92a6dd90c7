#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "options.h"

namespace transformer {

/// Attention and a feed-forward network, each after a layer norm and beside a residual connection
/// (Xiong et al., arXiv:2002.04745). Computes, and names its parameters, as Python's
/// nn.TransformerEncoderLayer does with norm_first and GELU; C++'s has no norm_first.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Shape& shape);

  /// \param x     [T, N, width]: in C++ attention takes time first.
  /// \param mask  [T, T], added to the attention's logits.
  at::Tensor forward(at::Tensor x, const at::Tensor& mask);

  torch::nn::MultiheadAttention self_attn;
  torch::nn::Linear linear1, linear2;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Block);

/// Predicts each next character from the previous ones: maps [N, T] int64 to logits [N, T,
/// vocabulary], with T at most the context.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(int64_t vocabulary, const Shape& shape);

  at::Tensor forward(const at::Tensor& characters);

  const Shape shape;
  torch::nn::Embedding tokens, positions;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(LanguageModel);

}  // namespace transformer
