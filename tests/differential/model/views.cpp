// Results that share memory with the argument, or have unusual strides.
#include "differential/net.h"

namespace ddp::differential {

// clang-format off
DDP_LAYER(
    "view", View,
    struct View : Layer {
      at::Tensor forward(at::Tensor x) override { return x.view_as(x); }
    });

DDP_LAYER(
    "transposed", Transposed,
    struct Transposed : Layer {
      at::Tensor forward(at::Tensor x) override { return x.t().t(); }
    });

DDP_LAYER(
    "narrowed", Narrowed,
    struct Narrowed : Layer {
      at::Tensor forward(at::Tensor x) override { return x.narrow(1, 0, 4); }
    });

DDP_LAYER(
    "unbound", Unbound,
    struct Unbound : Layer {
      at::Tensor forward(at::Tensor x) override { return x.unsqueeze(0).unbind(0)[0]; }
    });
// clang-format on

DDP_LAYER(
    "by_columns", ByColumns, struct ByColumns
    : Layer {
      at::Tensor forward(at::Tensor x) override { return (x * scale).t().contiguous().t(); }
      at::Tensor scale = register_parameter("scale", torch::ones({4}));
    });

DDP_LAYER(
    "in_place", InPlace, struct InPlace
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        auto y = linear(x);
        y.mul_(2).relu_();
        return y + x;
      }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    });

// clang-format off
DDP_LAYER(
    "in_place_on_input", InPlaceOnInput,
    struct InPlaceOnInput : Layer {
      at::Tensor forward(at::Tensor x) override { return torch::leaky_relu_(x, 0.5); }
    });
// clang-format on

DDP_LAYER(
    "coupling", Coupling, struct Coupling
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        const auto halves = x.chunk(2, 1);
        return torch::cat({halves[0], halves[1] + linear(halves[0])}, 1);
      }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
    });

}  // namespace ddp::differential
