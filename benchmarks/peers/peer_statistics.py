"""The statistics of ddp_bench (benchmarks/ddp_bench/statistics.h), in Python."""

import math


def quantile(values, q):
    """The q quantile of the values, interpolated; 0.5 is the median."""
    values = sorted(values)
    place = q * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def overlap(compute, comm, step):
    """The share of the communication that overlaps with computation, from 0 to 1."""
    if not comm > 0:
        return 0.0
    return min(max((compute + comm - step) / comm, 0.0), 1.0)


# With fewer values not even the interval from the smallest to the largest has 95% confidence.
FEWEST_FOR_INTERVAL = 6
LEFT_OUT = 0.05  # of all cases, by a confidence interval


def median_interval(values):
    """The ends of the 95% confidence interval of the median, by the sign test; None for few values."""
    count = len(values)
    if count < FEWEST_FOR_INTERVAL:
        return None
    values = sorted(values)
    low, chance = 0, 0.5**count  # that at most `low` of the values lie below the median
    while chance <= LEFT_OUT / 2:
        low += 1
        chance += math.comb(count, low) / 2**count
    return values[low - 1], values[count - low]


def paired_ratio(values, base):
    """The median of values[i] / base[i], its interval, and the ratios themselves."""
    ratios = [value / one for value, one in zip(values, base)]
    return quantile(ratios, 0.5), median_interval(ratios), ratios
