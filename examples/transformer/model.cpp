#include "model.h"

#include <limits>
#include <tuple>

#include <ATen/ATen.h>
#include <ddp/activation_checkpoint.h>
#include <torch/nn/init.h>

namespace transformer {
namespace {

namespace nn = torch::nn;

/// -inf above the diagonal: a position does not attend to later characters.
at::Tensor causal_mask(int64_t size, const at::TensorOptions& options) {
  return at::full({size, size}, -std::numeric_limits<double>::infinity(), options).triu(1);
}

nn::Embedding embedding(int64_t entries, int64_t width) {
  nn::Embedding embedding(entries, width);
  nn::init::normal_(embedding->weight, 0, 0.02);
  return embedding;
}

nn::LayerNorm layer_norm(int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

}  // namespace

BlockImpl::BlockImpl(const Shape& shape)
    : self_attn(register_module(
          "self_attn",
          nn::MultiheadAttention(
              nn::MultiheadAttentionOptions(shape.width, shape.heads).dropout(shape.dropout)))),
      linear1(register_module("linear1", nn::Linear(shape.width, 4 * shape.width))),
      linear2(register_module("linear2", nn::Linear(4 * shape.width, shape.width))),
      norm1(register_module("norm1", layer_norm(shape.width))),
      norm2(register_module("norm2", layer_norm(shape.width))),
      dropout(register_module("dropout", nn::Dropout(shape.dropout))) {}

at::Tensor BlockImpl::forward(at::Tensor x, const at::Tensor& mask) {
  const auto y = norm1(x);
  const auto seen = std::get<0>(self_attn(
      y, y, y, /*key_padding_mask=*/at::Tensor(), /*need_weights=*/false, /*attn_mask=*/mask));
  x = x + dropout(seen);
  return x + dropout(linear2(dropout(at::gelu(linear1(norm2(x))))));
}

LanguageModelImpl::LanguageModelImpl(int64_t vocabulary, const Shape& shape)
    : shape(shape),
      tokens(register_module("tokens", embedding(vocabulary, shape.width))),
      positions(register_module("positions", embedding(shape.context, shape.width))),
      layers(register_module("layers", nn::ModuleList())),
      norm(register_module("norm", layer_norm(shape.width))),
      head(register_module("head", nn::Linear(shape.width, vocabulary))),
      dropout(register_module("dropout", nn::Dropout(shape.dropout))) {
  for (int64_t i = 0; i < shape.layers; ++i) layers->push_back(Block(shape));
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& characters) {
  const int64_t length = characters.size(1);
  const auto places = at::arange(length, characters.options());
  const auto mask = causal_mask(length, head->weight.options());
  auto x = dropout(tokens(characters) + positions(places)).transpose(0, 1);
  for (const auto& layer : *layers) {
    auto& block = *layer->as<Block>();
    x = shape.checkpoint_activations ? ddp::checkpoint(block, x, mask) : block.forward(x, mask);
  }
  return head(norm(x)).transpose(0, 1);
}

}  // namespace transformer
