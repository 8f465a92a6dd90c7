#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include <c10/util/Exception.h>

namespace ddp_bench {
namespace {

constexpr double kLeftOut = 0.05;  // share of cases in which the interval misses the median

// The probability of `heads` heads in `tosses` tosses of a coin.
double chance_of_heads(size_t tosses, size_t heads) {
  const auto all = static_cast<double>(tosses);
  const auto some = static_cast<double>(heads);
  const double ways = std::lgamma(all + 1) - std::lgamma(some + 1) - std::lgamma(all - some + 1);
  return std::exp(ways - all * std::log(2.0));
}

}  // namespace

double quantile(std::vector<double> values, double q) {
  TORCH_CHECK_VALUE(
      !values.empty() && q >= 0 && q <= 1, "quantile: expected values and a share in [0, 1], got ",
      values.size(), " values and ", q, ".");
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(std::floor(place));
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - std::floor(place));
}

double overlap(double compute, double comm, double step) {
  if (!(comm > 0)) return 0;
  return std::clamp((compute + comm - step) / comm, 0.0, 1.0);
}

std::optional<Interval> median_interval(std::vector<double> values) {
  const size_t count = values.size();
  if (count < kFewestForInterval) return std::nullopt;
  std::sort(values.begin(), values.end());
  // The probability that at most `low` of the values lie below the median.
  size_t low = 0;
  double chance = 0;
  while ((chance += chance_of_heads(count, low)) <= kLeftOut / 2) ++low;
  return Interval{values[low - 1], values[count - low]};
}

PairedRatio paired_ratio(const std::vector<double>& values, const std::vector<double>& base) {
  TORCH_CHECK_VALUE(
      values.size() == base.size(), "paired_ratio: expected as many values as of the base, ",
      base.size(), ", got ", values.size(), ".");
  PairedRatio ratio;
  for (size_t i = 0; i < values.size(); ++i) ratio.of_rounds.push_back(values[i] / base[i]);
  ratio.median = quantile(ratio.of_rounds, 0.5);
  ratio.interval = median_interval(ratio.of_rounds);
  return ratio;
}

}  // namespace ddp_bench
