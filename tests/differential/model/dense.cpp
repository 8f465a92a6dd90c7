// Layers that see their own rank's rows alone, from LibTorch's modules.
#include "differential/net.h"

namespace ddp::differential {

DDP_LAYER(
    "linear", Linear, struct Linear
    : Layer {
      at::Tensor forward(at::Tensor x) override { return linear(x); }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    });

DDP_LAYER(
    "residual", Residual, struct Residual
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + torch::tanh(linear(x)); }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    });

DDP_LAYER(
    "conv", Conv, struct Conv
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        return conv(x.reshape({-1, 1, 2, 2})).reshape({-1, 4});
      }
      torch::nn::Conv2d conv{
          register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 1, 3).padding(1)))};
    });

DDP_LAYER(
    "layer_norm", LayerNorm, struct LayerNorm
    : Layer {
      at::Tensor forward(at::Tensor x) override { return norm(x); }
      torch::nn::LayerNorm norm{
          register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})))};
    });

DDP_LAYER(
    "batch_norm", BatchNorm, struct BatchNorm
    : Layer {
      at::Tensor forward(at::Tensor x) override { return norm(x); }
      torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(4))};
    });

DDP_LAYER(
    "gru", Gru, struct Gru
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        return std::get<0>(gru(x.reshape({-1, 2, 2}))).reshape({-1, 4});
      }
      torch::nn::GRU gru{
          register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(2, 2).batch_first(true)))};
    });

DDP_LAYER(
    "attention", Attention, struct Attention
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        const auto parts = in(x).reshape({-1, 3, 2, 2}).unbind(1);
        const auto weights = torch::softmax(parts[0].matmul(parts[1].transpose(1, 2)), -1);
        return x + out(weights.matmul(parts[2]).reshape({-1, 4}));
      }
      torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 12))};
      torch::nn::Linear out{register_module("out", torch::nn::Linear(4, 4))};
    });

DDP_LAYER(
    "frozen", Frozen, struct Frozen
    : Layer {
      Frozen() {
        for (auto& p : linear->parameters()) p.set_requires_grad(false);
      }
      at::Tensor forward(at::Tensor x) override { return linear(x); }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    });

DDP_LAYER(
    "weight_norm", WeightNorm, struct WeightNorm
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        return torch::linear(x, length * direction / direction.norm(2, {1}, true));
      }
      at::Tensor direction = register_parameter("direction", torch::ones({4, 4}));
      at::Tensor length = register_parameter("length", torch::ones({4, 1}));
    });

// Each row has a mask of its own, so that it does not matter what other layers drew before.
// clang-format off
DDP_LAYER(
    "dropout", Dropout,
    struct Dropout : Layer {
      at::Tensor forward(at::Tensor x) override {
        if (!is_training()) return x;
        return 2 * (values(x.size(0), x.sizes()) > 0).to(x.dtype()) * x;
      }
    });
// clang-format on

// The parameter has a gradient only where it is used.
DDP_LAYER(
    "sometimes", Sometimes, struct Sometimes
    : Layer {
      at::Tensor forward(at::Tensor x) override { return (used ? x * weight : x) + bias; }
      at::Tensor weight = register_parameter("weight", torch::ones({4}));
      at::Tensor bias = register_parameter("bias", torch::ones({4}));
    });

}  // namespace ddp::differential
