// The layers of a block, whole on each rank, or cut over the ranks of --tp and --cp. Beside the
// table nothing else of the model depends on that.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "../groups.h"
#include "../options.h"

namespace transformer {

/// A module, and its forward: modules that are whole and modules that are cut have other types.
struct Layer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> forward;
};

/// The layer that a holder has.
template <typename Holder>
Layer layer_of(const Holder& holder) {
  const auto module = holder.ptr();
  return {module, [module](const at::Tensor& x) { return module->forward(x); }};
}

/// Maps [T, N, width] to the same: each position attends to those before it and itself.
///
/// All functions here draw a whole layer's values, in the same order, whatever is cut. Collective
/// where it is.
Layer make_attention(const Shape& shape, const Groups& groups);
/// From width to 4 * width features, of which each rank of --tp gets some.
Layer make_up(const Shape& shape, const Groups& groups);
/// Back from them.
Layer make_down(const Shape& shape, const Groups& groups);
}  // namespace transformer
