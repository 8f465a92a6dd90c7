#include "sharded/gradient_notes.h"

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>

namespace ddp {
namespace {

constexpr int kDigits = kNumberNotes / 2;

int64_t digit_of(int64_t number, int digit) { return number >> digit & 1; }

constexpr int64_t kMostElements = 64;  // of a sample
constexpr size_t kMostSamples = 4;
constexpr int64_t kLeastElements = 4;  // that are not zero, of all samples

// As parts of the factor.
constexpr double kRounding = 1e-3;  // of a gradient's element
constexpr double kDifference = 0.02;

/// The first elements, on the host, in memory of their own.
at::Tensor first_elements(const at::Tensor& gradient) {
  const auto flat = gradient.detach().reshape({-1});
  return flat.narrow(0, 0, std::min(flat.numel(), kMostElements))
      .to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

void write_number(int64_t number, float* notes) {
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto is_one = digit_of(number, digit);
    notes[2 * digit] = is_one ? 0.F : 1.F;
    notes[2 * digit + 1] = is_one ? 1.F : 0.F;
  }
}

std::optional<int64_t> read_number(const float* sums, int64_t number, int64_t others) {
  bool is_same = true, is_of_all_others = true;
  int64_t written = 0;
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto mine = digit_of(number, digit);
    const auto like_mine = sums[2 * digit + mine], unlike_mine = sums[2 * digit + 1 - mine];
    const bool differs = unlike_mine != 0;
    if (differs) {
      is_same = false;
      is_of_all_others &= unlike_mine == like_mine * static_cast<float>(others);
    }
    written |= (differs ? 1 - mine : mine) << digit;
  }
  if (is_same) return std::nullopt;
  return is_of_all_others ? written : 0;
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

void write_factor(double factor, float* notes) {
  const auto value = static_cast<float>(factor);
  notes[0] = value > 0 ? 1.F : 0.F;
  notes[1] = value;
  notes[2] = value * value;
}

bool differ_in_factor(const float* sums) {
  const double count = sums[0], sum = sums[1], squares = sums[2];
  if (count < 2) return false;
  const auto mean = sum / count;
  return squares / count - mean * mean > kDifference * kDifference * mean * mean;
}

}  // namespace ddp
