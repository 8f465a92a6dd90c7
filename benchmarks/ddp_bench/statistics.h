#pragma once

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

}  // namespace ddp_bench
