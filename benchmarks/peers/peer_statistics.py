"""What ddp_bench makes of its times (benchmarks/ddp_bench/statistics.h), in Python."""

import math


def quantile(values, q):
    """The value that a share q of the values lies below, interpolated; 0.5 is the median."""
    values = sorted(values)
    place = q * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def overlap(compute, comm, step):
    """The share of the communication that a step hides behind its computation, from 0 to 1."""
    if not comm > 0:
        return 0.0
    return min(max((compute + comm - step) / comm, 0.0), 1.0)
