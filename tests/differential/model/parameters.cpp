// Parameters and buffers of unusual shapes and dtypes, tied ones, and functions of the program's
// own.
#include "differential/net.h"

namespace ddp::differential {

DDP_LAYER(
    "complex", Complex, struct Complex
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x * torch::real(weight * weight.conj()); }
      at::Tensor weight = register_parameter("weight", torch::ones({4}, torch::kComplexDouble));
    });

DDP_LAYER(
    "scalar", Scalar, struct Scalar
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x * weight; }
      at::Tensor weight = register_parameter("weight", torch::ones({}));
    });

DDP_LAYER(
    "empty", Empty, struct Empty
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x * weight + none.sum(); }
      at::Tensor none = register_parameter("none", torch::ones({0, 3}));
      at::Tensor weight = register_parameter("weight", torch::ones({4}));
    });

DDP_LAYER(
    "strided", Strided, struct Strided
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x.matmul(weight); }
      at::Tensor weight = register_parameter("weight", torch::ones({4, 4}, torch::kDouble).t());
    });

// More elements than fit into a small bucket, a page of gradients and a slot of shared memory.
DDP_LAYER(
    "wide", Wide, struct Wide
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + x.matmul(weight).sum(1, true) / 1e3; }
      at::Tensor weight = register_parameter("weight", torch::ones({4, 2049}));
    });

DDP_LAYER(
    "buffers", Buffers, struct Buffers
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        if (is_training()) {
          steps += 1;
          rows += static_cast<double>(x.size(0));
          odd.logical_not_();
        }
        return x * (1 + steps.to(torch::kDouble) / 8) + rows.clone() / 100 +
               odd.to(torch::kDouble) / 50;
      }
      at::Tensor steps = register_buffer("steps", torch::zeros({}, torch::kLong));
      at::Tensor rows = register_buffer("rows", torch::zeros({1}, torch::kDouble));
      at::Tensor odd = register_buffer("odd", torch::zeros({4}, torch::kBool));
    });

// clang-format off
DDP_LAYER(
    "function", Squared,
    struct Square : torch::autograd::Function<Square> {
      static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
        context->save_for_backward({x});
        return x * x;
      }
      static torch::autograd::variable_list backward(
          torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
        return {2 * context->get_saved_variables()[0] * gradients[0]};
      }
    };
    struct Squared : Layer {
      at::Tensor forward(at::Tensor x) override { return Square::apply(torch::tanh(linear(x))); }
      torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    });
    // clang-format on

    DDP_SOURCE(
        Tied,
        // Uses the first square weight of the layers before it, and has one of its own where there
        // is none.
        struct Tied
        : Layer {
          Tied(const std::vector<at::Tensor>& earlier, bool is_member) {
            for (const auto& p : earlier) {
              if (!weight.defined() && p.sizes() == at::IntArrayRef({4, 4}) && p.requires_grad())
                weight = p;
            }
            if (!weight.defined()) {
              weight = register_parameter("weight", torch::ones({4, 4}, torch::kDouble));
            } else if (is_member) {
              register_parameter("weight", weight);
            }
          }
          at::Tensor forward(at::Tensor x) override { return torch::linear(x, weight); }
          at::Tensor weight;
        });

    namespace {

    LayerKind tied(bool is_member) {
      LayerKind kind;
      kind.make = [is_member](const Rank&, const auto& earlier) {
        std::vector<at::Tensor> parameters;
        for (const auto& layer : earlier) {
          for (const auto& p : layer->parameters()) parameters.push_back(p);
        }
        return std::make_shared<Tied>(parameters, is_member);
      };
      kind.source = "Tied";
      kind.call = std::string("std::make_shared<Tied>(net->parameters(), ") +
                  (is_member ? "true)" : "false)");
      return kind;
    }
    const RegisteredLayer tied_layer("tied", tied(false));
    const RegisteredLayer tied_member_layer("tied_member", tied(true));

    }  // namespace
    }  // namespace ddp::differential
