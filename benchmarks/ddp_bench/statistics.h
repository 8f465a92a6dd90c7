#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace ddp_bench {

/// The `q` quantile, q in [0, 1], of at least one value, interpolated between the two nearest: 0.5
/// is the median.
double quantile(std::vector<double> values, double q);

/// The share of the communication that overlaps with computation, from 0 to 1: the time saved by
/// running both at once, compute + comm - step, over comm.
///
/// A step also copies and waits: that time counts as communication that is not hidden. 0 where
/// nothing is communicated. All in one unit of time.
double overlap(double compute, double comm, double step);

struct Interval {
  double low = 0;
  double high = 0;
};

/// With fewer values not even the interval from the smallest to the largest has 95% confidence.
inline constexpr size_t kFewestForInterval = 6;

/// The 95% confidence interval of the median of the distribution of `values`; nothing for fewer
/// than kFewestForInterval values.
///
/// Its ends are two of the values, equally far from the smallest and from the largest: the
/// innermost two for which the sign test gives a probability of at least 95%. It holds for any
/// distribution, if the values are independent of each other.
std::optional<Interval> median_interval(std::vector<double> values);

/// The ratio of two series of paired measurements.
struct PairedRatio {
  std::vector<double> of_rounds;     // by round, the first over the second
  double median = 0;                 // of these
  std::optional<Interval> interval;  // of the median
};

/// Compares the times of two modes, round by round. A disturbance of both modes in a round cancels
/// out, and one of a single mode affects only one of many rounds.
///
/// \param base  as many values, all of them above 0.
PairedRatio paired_ratio(const std::vector<double>& values, const std::vector<double>& base);

}  // namespace ddp_bench
