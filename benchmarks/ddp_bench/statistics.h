#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace ddp_bench {

/// The value that a share `q` in [0, 1] of at least one value lies below, interpolated between the
/// two nearest: 0.5 is the median.
double quantile(std::vector<double> values, double q);

/// The share of the communication that a step hides behind its computation, from 0 to 1: of
/// compute + comm - step, what running both at once saves, that much of comm.
///
/// A step also copies and waits: what that costs counts as communication that is not hidden. 0
/// where nothing is communicated. All in one unit of time.
double overlap(double compute, double comm, double step);

struct Interval {
  double low = 0;
  double high = 0;
};

/// With fewer values not even the smallest and the largest hold the median with 95% confidence.
inline constexpr size_t kFewestForInterval = 6;

/// The 95% confidence interval of the median that `values` are drawn around; nothing for fewer than
/// kFewestForInterval values.
///
/// Its ends are two of the values, as many from the smallest as from the largest: the innermost two
/// for which the sign test gives a chance of at least 95%. Whatever the distribution is, it holds
/// for values that are independent of each other.
std::optional<Interval> median_interval(std::vector<double> values);

/// How two series of paired measurements compare.
struct PairedRatio {
  std::vector<double> of_rounds;     // the first over the second
  double median = 0;                 // of these
  std::optional<Interval> interval;  // of the median
};

/// Compares what two modes came to, round by round. What slows both modes down in a round does not
/// count, and a round in which one of them was disturbed counts as one of many.
///
/// \param base  as many values, all of them above 0.
PairedRatio paired_ratio(const std::vector<double>& values, const std::vector<double>& base);

}  // namespace ddp_bench
