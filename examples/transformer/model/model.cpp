#include "model.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/activation_checkpoint.h>
#include <ddp/autocast.h>
#include <ddp/context_parallel.h>
#include <ddp/fully_sharded.h>
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

Layer make_block(const Block& block, const Groups& groups, bool is_unit) {
  if (!is_unit) return layer_of(block);
  return layer_of(
      ddp::FullyShardedDataParallel(block, ddp::FullyShardedOptions().process_group(groups.data)));
}

/// bfloat16 has the range of float32: no GradScaler is needed.
ddp::AutocastOptions autocast_of(const Shape& shape) {
  return ddp::AutocastOptions(at::kBFloat16).enabled(shape.amp);
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

bool Stage::has(int64_t layer, int64_t layers) const {
  const int64_t each = layers / count, longer = layers % count;
  const int64_t begin = index * each + std::min(index, longer);
  return begin <= layer && layer < begin + each + (index < longer ? 1 : 0);
}

LanguageModelImpl::LanguageModelImpl(
    int64_t vocabulary, const Shape& shape, Groups given, bool cuts_blocks, Stage stage)
    : vocabulary(vocabulary),
      shape(shape),
      groups(std::move(given)),
      stage(stage),
      dropout(register_module("dropout", nn::Dropout(shape.dropout))) {
  const bool has_table = stage.is_first() || stage.is_last();
  // Of one process the root of the units has the table: it is used at both ends of a pass.
  auto table = make_table(vocabulary, shape, groups, cuts_blocks && has_table && stage.count > 1);
  if (has_table) {
    register_module("tokens", table.module);
    tokens = std::move(table);
  }
  const auto drawn_positions = make_positions(shape);
  if (stage.is_first()) positions = register_module("positions", drawn_positions);
  const auto list = register_module("layers", std::make_shared<nn::Module>());
  for (int64_t i = 0; i < shape.layers; ++i) {
    const Block block(shape, groups);
    if (!stage.has(i, shape.layers)) continue;
    layers.push_back(make_block(block, groups, cuts_blocks));
    list->register_module(std::to_string(i), layers.back().module);
  }
  if (stage.is_last()) norm = register_module("norm", layer_norm(shape.width));
}

at::Tensor LanguageModelImpl::embed(const at::Tensor& characters) {
  const auto places = groups.places(characters.size(1)).to(characters.device());
  const auto own = groups.own_positions(characters);
  return dropout(tokens.vectors(own) + positions(places)).transpose(0, 1);
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& input) {
  const ddp::AutocastGuard autocast(device().type(), autocast_of(shape));
  auto x = stage.is_first() ? embed(input) : input;
  for (const auto& block : layers) {
    const auto options = ddp::CheckpointOptions().parameters(block.module->parameters());
    x = shape.checkpoint_activations ? ddp::checkpoint(options, block.forward, x)
                                     : block.forward(x);
  }
  return stage.is_last() ? tokens.logits(norm(x)).transpose(0, 1) : x;
}

at::Tensor LanguageModelImpl::loss(const at::Tensor& logits, const at::Tensor& target) const {
  const ddp::AutocastGuard autocast(device().type(), autocast_of(shape));
  return cross_entropy(logits.flatten(0, 1), target.flatten(), vocabulary, groups);
}

at::Tensor LanguageModelImpl::padded(const at::Tensor& characters) const {
  if (groups.cp_size() == 1) return characters;
  const int64_t pieces = 2 * groups.cp_size();
  return at::constant_pad_nd(characters, {0, (pieces - characters.size(1) % pieces) % pieces});
}

at::Tensor LanguageModelImpl::last_logits(const at::Tensor& logits, int64_t length) const {
  const auto whole =
      groups.cp_size() == 1 ? logits : ddp::functional::context_gather(logits, 1, groups.cp);
  return whole_vocabulary(whole.select(1, length - 1), vocabulary, groups);
}

std::vector<ddp::ParameterLayout> LanguageModelImpl::layouts() {
  std::vector<ddp::ParameterLayout> layouts;
  if (!groups.tp || groups.tp_size() > 1) return layouts;
  for (const auto& item : named_parameters()) {
    const auto& p = item.value();
    ddp::ParameterLayout layout;
    layout.name = item.key();
    layout.sizes = p.sizes().vec();
    layout.dtype = p.scalar_type();
    layout.local = p;
    layout.boxes = {{std::vector<int64_t>(layout.sizes.size(), 0), layout.sizes}};
    layout.replicated_over = {groups.tp};
    layouts.push_back(std::move(layout));
  }
  return layouts;
}

}  // namespace transformer
