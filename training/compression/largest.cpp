#include "largest.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include <ATen/ops/abs.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/topk.h>

namespace ddp {
namespace {

at::Tensor largest_indices(const at::Tensor& magnitudes, int64_t count) {
  return std::get<1>(magnitudes.topk(count, /*dim=*/0, /*largest=*/true, /*sorted=*/false));
}

// Estimates, from a sample, a magnitude that few more than `count` elements reach.
at::Tensor estimate_threshold(const at::Tensor& magnitudes, int64_t count, int64_t stride) {
  const auto sample = magnitudes.slice(0, 0, magnitudes.numel(), stride).contiguous();
  const auto expected = static_cast<double>(count) / static_cast<double>(stride);
  const auto generous = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 8);
  const auto rank = std::min(generous, sample.numel());
  return std::get<0>(sample.topk(rank)).select(0, rank - 1);
}

}  // namespace

at::Tensor largest_magnitudes(const at::Tensor& values, int64_t count) {
  const auto magnitudes = values.abs();
  // A prime, so that the sample is not in step with the rows of a matrix.
  constexpr int64_t kStride = 97;
  constexpr int64_t kFew = 16;
  const bool is_worth_it = values.is_cpu() && count >= kStride && count * kFew <= values.numel();
  if (!is_worth_it) return largest_indices(magnitudes, count);
  // Drops elements below the threshold; NaN compares false, and stays.
  const auto threshold = estimate_threshold(magnitudes, count, kStride);
  const auto candidates = magnitudes.lt(threshold).logical_not_().nonzero().view({-1});
  if (candidates.numel() < count) return largest_indices(magnitudes, count);
  const auto chosen = largest_indices(magnitudes.index_select(0, candidates), count);
  return candidates.index_select(0, chosen);
}

}  // namespace ddp
