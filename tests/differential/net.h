// The model of a program: layers one after the other, each of which maps [rows, 4] to [rows, 4].
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "differential/choice.h"
#include "differential/source.h"
#include "support/ranks.h"

namespace ddp::differential {

using testing::Rank;

DDP_SOURCE(
    values,
    /// Numbers between -1 and 1 that only the arguments decide.
    inline at::Tensor values(int64_t seed, at::IntArrayRef sizes) {
      auto result = torch::empty(sizes, torch::kDouble);
      double* data = result.data_ptr<double>();
      for (int64_t i = 0; i < result.numel(); ++i) {
        data[i] =
            std::sin(static_cast<double>(seed % 9973) * 1.7 + static_cast<double>(i + 1) * 2.3);
      }
      return result;
    });

DDP_SOURCE(
    Layer, struct Layer
    : torch::nn::Module {
      virtual at::Tensor forward(at::Tensor x) = 0;
      virtual void use_clones() {}
      bool used = true, fails = false;
    });

DDP_SOURCE(
    Net, struct Net
    : Layer {
      void add(const std::string& name, const std::shared_ptr<Layer>& layer) {
        register_module(name, layer);
        calls.push_back([layer](at::Tensor x) { return layer->forward(x); });
      }
      at::Tensor forward(at::Tensor x) override {
        for (const auto& call : calls) x = call(x);
        return x;
      }
      std::vector<std::function<at::Tensor(at::Tensor)>> calls;
    });

// A weight at both ends of a pipeline.
DDP_SOURCE(
    Table, struct Table
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x.matmul(weight); }
      at::Tensor weight = register_parameter("weight", torch::ones({4, 4}));
    });

DDP_SOURCE(
    checksum,
    /// One number for a tensor, which changes where two elements change places.
    inline double checksum(const at::Tensor& t) {
      const auto real =
          (t.is_complex() ? at::view_as_real(t.detach()) : t.detach()).to(torch::kDouble).flatten();
      return (real * (torch::arange(real.numel(), torch::kDouble) + 1)).sum().item<double>();
    });

/// Gives parameters and floating buffers values that follow from their names; `offset` makes
/// others.
DDP_SOURCE(
    set_values, inline void set_values(torch::nn::Module& module, int64_t offset) {
      const torch::NoGradGuard no_grad;
      int64_t seed = offset;
      for (auto& item : module.named_parameters()) {
        auto& parameter = item.value();
        seed += 17;
        auto drawn = values(
            seed, parameter.is_complex() ? at::view_as_real(parameter).sizes() : parameter.sizes());
        parameter.copy_(parameter.is_complex() ? at::view_as_complex(drawn) : drawn);
      }
    });

/// The name of a layer in a net.
inline std::string layer_name(size_t i) { return std::string(1, static_cast<char>('a' + i)); }

/// The values of one layer's input or output on all ranks.
using OfRanks = std::vector<at::Tensor>;

/// What a construct says of a layer.
struct LayerKind {
  /// For one rank. `earlier` has the layers before it.
  std::function<std::shared_ptr<Layer>(
      const Rank& self, const std::vector<std::shared_ptr<Layer>>& earlier)>
      make;
  /// The constructor call that is printed, and the name in sources().
  std::string source, call;
  /// For layers that see all ranks: what the reference does with LibTorch alone; `layers` has each
  /// rank's copy.
  std::function<OfRanks(const std::vector<std::shared_ptr<Layer>>& layers, const OfRanks& x)>
      together = nullptr;
  /// In place of `make` in the reference, with the same names; for layers that need a group.
  std::function<std::shared_ptr<Layer>()> alone = nullptr;
  /// For layers that are cut over the mesh's ranks of "tp", which `make` gets: the name of `alone`
  /// in sources().
  std::string whole_source = "";
};

/// All layers by their label.
std::map<std::string, LayerKind>& layer_kinds();
struct RegisteredLayer {
  RegisteredLayer(const std::string& label, LayerKind kind) {
    layer_kinds()[label] = std::move(kind);
  }
};

/// For a layer without arguments.
template <typename L>
LayerKind plain(const std::string& source) {
  LayerKind kind;
  kind.make = [](const Rank&, const auto&) { return std::make_shared<L>(); };
  kind.source = source;
  kind.call = "std::make_shared<" + source + ">()";
  return kind;
}

/// Defines a layer, and registers it under its label.
#define DDP_LAYER(label, name, ...) \
  DDP_SOURCE(name, __VA_ARGS__);    \
  const RegisteredLayer name##_layer(label, plain<name>(#name))

}  // namespace ddp::differential
