// The layers that are whole on each rank, or cut over the ranks of --tp and --cp. Nothing else of
// the model depends on that.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "groups.h"
#include "options.h"

namespace transformer {

/// A module, and its forward: modules that are whole and modules that are cut have other types.
struct Layer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> forward;
};

/// Maps [T, N, width] to the same: each position attends to those before it and itself.
///
/// All functions here draw a whole layer's values, in the same order, whatever is cut. Collective
/// where it is.
Layer make_attention(const Shape& shape, const Groups& groups);
/// From width to 4 * width features, of which each rank of --tp gets some.
Layer make_up(const Shape& shape, const Groups& groups);
/// Back from them.
Layer make_down(const Shape& shape, const Groups& groups);
/// Maps characters to vectors.
Layer make_tokens(int64_t vocabulary, const Shape& shape, const Groups& groups);
/// Maps vectors to logits, of which each rank of --tp gets as many. The last rank's may be more
/// than there are characters.
Layer make_head(int64_t vocabulary, const Shape& shape, const Groups& groups);

/// The mean cross entropy of logits [n, own] of make_head(). Collective where they are cut.
at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary, const Groups& groups);
/// Joins them to [..., vocabulary]. Collective where they are cut.
at::Tensor whole_vocabulary(const at::Tensor& logits, int64_t vocabulary, const Groups& groups);

}  // namespace transformer
