#include "transformer.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace ddp_bench {
namespace {

constexpr int64_t kLayers = 6;
constexpr int64_t kWidth = 256;
constexpr int64_t kHeads = 8;

class TransformerLayer : public torch::nn::Module {
 public:
  TransformerLayer()
      : norm1_(register_module("norm1", layer_norm())),
        qkv_(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        out_(register_module("out", torch::nn::Linear(kWidth, kWidth))),
        norm2_(register_module("norm2", layer_norm())),
        up_(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down_(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}

  static torch::nn::LayerNorm layer_norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + attention(norm1_(x));
    return y + down_(at::gelu(up_(norm2_(y))));
  }

 private:
  at::Tensor attention(const at::Tensor& x) {
    const auto heads = qkv_(x)
                           .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4})  // q, k, v; sample; head; token
                           .unbind();
    const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2]);
    return out_(mixed.transpose(1, 2).reshape(x.sizes()));
  }

  torch::nn::LayerNorm norm1_;
  torch::nn::Linear qkv_;
  torch::nn::Linear out_;
  torch::nn::LayerNorm norm2_;
  torch::nn::Linear up_;
  torch::nn::Linear down_;
};

class Transformer : public Net {
 public:
  Transformer()
      : tokens_(register_module("tokens", torch::nn::Embedding(kTransformerVocabulary, kWidth))),
        positions_(register_module("positions", torch::nn::Embedding(kTransformerLength, kWidth))),
        layers_(register_module("layers", torch::nn::Sequential())) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      layers_->push_back(std::make_shared<TransformerLayer>());
    }
    norm_ = register_module("norm", TransformerLayer::layer_norm());
    head_ = register_module("head", torch::nn::Linear(kWidth, kTransformerVocabulary));
  }

  at::Tensor forward(const at::Tensor& x) override {
    const auto embedded = tokens_(x) + positions_->weight;
    return head_(norm_(layers_->forward(embedded))).flatten(0, 1);
  }

 private:
  torch::nn::Embedding tokens_;
  torch::nn::Embedding positions_;
  torch::nn::Sequential layers_;
  torch::nn::LayerNorm norm_ = nullptr;
  torch::nn::Linear head_ = nullptr;
};

}  // namespace

std::shared_ptr<Net> make_transformer() { return std::make_shared<Transformer>(); }

}  // namespace ddp_bench
