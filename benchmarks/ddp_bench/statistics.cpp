#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include <c10/util/Exception.h>

namespace ddp_bench {

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

}  // namespace ddp_bench
