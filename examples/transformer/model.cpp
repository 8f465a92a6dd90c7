#include "model.h"

#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/activation_checkpoint.h>
#include <ddp/context_parallel.h>
#include <ddp/tensor_parallel_rng.h>
#include <torch/nn/init.h>

namespace transformer {
namespace {

namespace nn = torch::nn;

nn::Embedding make_positions(const Shape& shape) {
  nn::Embedding embedding(shape.context, shape.width);
  nn::init::normal_(embedding->weight, 0, 0.02);
  return embedding;
}

nn::LayerNorm layer_norm(int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

/// Registers a layer's module.
Layer add(nn::Module& parent, const char* name, Layer layer) {
  parent.register_module(name, layer.module);
  return layer;
}

}  // namespace

BlockImpl::BlockImpl(const Shape& shape, const Groups& groups)
    : groups(groups),
      self_attn(add(*this, "self_attn", make_attention(shape, groups))),
      linear1(add(*this, "linear1", make_up(shape, groups))),
      linear2(add(*this, "linear2", make_down(shape, groups))),
      norm1(register_module("norm1", layer_norm(shape.width))),
      norm2(register_module("norm2", layer_norm(shape.width))),
      dropout(register_module("dropout", nn::Dropout(shape.dropout))) {}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + dropout(self_attn.forward(norm1(x)));
  return x + dropout(linear2.forward(drop_hidden(at::gelu(linear1.forward(norm2(x))))));
}

// Each rank of --tp has other features here; elsewhere all have the same, and drop the same.
at::Tensor BlockImpl::drop_hidden(const at::Tensor& hidden) {
  std::optional<ddp::TensorParallelRng> own_numbers;
  if (groups.tp_size() > 1) own_numbers.emplace(groups.tp);
  return dropout(hidden);
}

LanguageModelImpl::LanguageModelImpl(int64_t vocabulary, const Shape& shape, Groups given)
    : vocabulary(vocabulary),
      shape(shape),
      groups(std::move(given)),
      tokens(add(*this, "tokens", make_tokens(vocabulary, shape, groups))),
      positions(register_module("positions", make_positions(shape))),
      layers(register_module("layers", nn::ModuleList())),
      norm(register_module("norm", layer_norm(shape.width))),
      head(add(*this, "head", make_head(vocabulary, shape, groups))),
      dropout(register_module("dropout", nn::Dropout(shape.dropout))) {
  for (int64_t i = 0; i < shape.layers; ++i) layers->push_back(Block(shape, groups));
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& characters) {
  const auto places = groups.places(characters.size(1)).to(characters.device());
  const auto own = groups.own_positions(characters);
  auto x = dropout(tokens.forward(own) + positions(places)).transpose(0, 1);
  for (const auto& layer : *layers) {
    auto& block = *layer->as<Block>();
    x = shape.checkpoint_activations ? ddp::checkpoint(block, x) : block.forward(x);
  }
  return head.forward(norm(x)).transpose(0, 1);
}

std::vector<ddp::ParameterLayout> LanguageModelImpl::layouts() {
  std::vector<ddp::ParameterLayout> layouts;
  if (!groups.tp || groups.tp_size() > 1) return layouts;
  for (const auto& item : named_parameters()) {
    const auto& p = item.value();
    ddp::ParameterLayout layout{item.key(), p.sizes().vec(), p.scalar_type(), p, {}, {groups.tp},
                                {}};
    layout.boxes = {{std::vector<int64_t>(layout.sizes.size(), 0), layout.sizes}};
    layouts.push_back(std::move(layout));
  }
  return layouts;
}

at::Tensor LanguageModelImpl::predict_next(const at::Tensor& characters) {
  const int64_t length = characters.size(1);
  if (groups.cp_size() == 1) {
    return whole_vocabulary(forward(characters).select(1, -1), vocabulary, groups);
  }
  // The ranks have as many positions each. No position attends to the padding after it.
  const int64_t pieces = 2 * groups.cp_size();
  const auto padded = at::constant_pad_nd(characters, {0, (pieces - length % pieces) % pieces});
  const auto logits = ddp::functional::context_gather(forward(padded), 1, groups.cp);
  return whole_vocabulary(logits.select(1, length - 1), vocabulary, groups);
}

}  // namespace transformer
