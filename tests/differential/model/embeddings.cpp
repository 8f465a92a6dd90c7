// Embeddings: dense, sparse, with padding, and one that forward renormalizes.
#include "differential/net.h"

namespace ddp::differential {

DDP_LAYER(
    "embedding", Embedded, struct Embedded
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + table(torch::arange(x.size(0)) % 5); }
      torch::nn::Embedding table{register_module("table", torch::nn::Embedding(7, 4))};
    });

DDP_LAYER(
    "embedding_sparse", SparselyEmbedded, struct SparselyEmbedded
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + table(torch::arange(x.size(0)) % 5); }
      torch::nn::Embedding table{register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).sparse(true)))};
    });

DDP_LAYER(
    "embedding_padding", EmbeddedWithPadding, struct EmbeddedWithPadding
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + table(torch::arange(x.size(0)) % 3); }
      torch::nn::Embedding table{register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(3, 4).padding_idx(0)))};
    });

// All ranks look up the same rows, so that replicas stay equal.
DDP_LAYER(
    "embedding_max_norm", Renormalized, struct Renormalized
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + table(torch::arange(5)).mean(0); }
      torch::nn::Embedding table{register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).max_norm(0.5)))};
    });

// As a program clamps a weight before it is used.
DDP_LAYER(
    "clamped", Clamped, struct Clamped
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        {
          const torch::NoGradGuard no_grad;
          weight.clamp_(-0.4, 0.4);
        }
        return x * weight;
      }
      at::Tensor weight = register_parameter("weight", torch::ones({4}));
    });

}  // namespace ddp::differential
