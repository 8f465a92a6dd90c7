#include "sharded/gradient_notes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

namespace ddp {
namespace {

constexpr int64_t kMostElements = 64;  // of a sample
constexpr size_t kMostSamples = 4;
constexpr int64_t kLeastElements = 4;  // that are not zero, of all samples

// As parts of the factor.
constexpr double kRounding = 1e-3;  // of a gradient's element
constexpr double kDifference = 0.04;

/// The first elements, on the host, in memory of their own.
at::Tensor first_elements(const at::Tensor& gradient) {
  const auto flat = gradient.detach().reshape({-1});
  return flat.narrow(0, 0, std::min(flat.numel(), kMostElements))
      .to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

void write_spread(std::optional<float> number, float* words) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  words[0] = number ? *number : kNone;
  words[1] = number ? -*number : kNone;
}

std::optional<Spread> read_spread(const float* words) {
  if (std::isinf(words[0])) return std::nullopt;
  return Spread{words[0], -words[1]};
}

bool ScaledGradients::takes(const at::Tensor& gradient) const {
  constexpr int64_t kMostKept = 1024;  // elements, until the next pass
  return gradient.is_cpu() && gradient.numel() > 0 && gradient.numel() <= kMostKept &&
         samples_.size() < kMostSamples;
}

void ScaledGradients::sample(const at::Tensor& gradient) {
  const bool is_alone = gradient.storage().nbytes() == gradient.nbytes();
  if (takes(gradient) && is_alone) samples_.emplace_back(gradient, first_elements(gradient));
}

double ScaledGradients::factor() const {
  double least = std::numeric_limits<double>::infinity(), largest = 0;
  int64_t count = 0;
  for (const auto& [gradient, before] : samples_) {
    const auto after = first_elements(gradient);
    const auto* const was = before.const_data_ptr<double>();
    const auto* const is = after.const_data_ptr<double>();
    for (int64_t i = 0; i < before.numel(); ++i) {
      if (was[i] == 0) continue;
      ++count;
      least = std::min(least, is[i] / was[i]);
      largest = std::max(largest, is[i] / was[i]);
    }
  }
  // One element alone may be what clip_grad_value_() has clipped.
  const bool is_one =
      count >= kLeastElements && least > 0 && largest - least <= kRounding * largest;
  return is_one && largest <= 1 + kRounding ? std::min(largest, 1.0) : 0;
}

bool differ_in_factor(const Spread& factors) {
  const auto most = static_cast<double>(factors.most);
  const auto least = static_cast<double>(factors.least);
  return most - least > kDifference * (most + least) / 2;
}

}  // namespace ddp
