"""A cost model of a data-parallel step: pure functions, in seconds and bytes.

An all-reduce of n bytes over p ranks consists of messages, each of which takes alpha + beta * bytes
(Hockney's model). Sums are counted in beta. Sources:

- ring, halving and doubling, recursive doubling: Thakur, Rabenseifner, Gropp, "Optimization of
  Collective Communication Operations in MPICH", 2005; Rabenseifner, "Optimization of Collective
  Reduction Operations", 2004
- the ring's 2 (p - 1) / p * n bytes are the fewest possible: Patarasuk, Yuan, "Bandwidth Optimal
  All-reduce Algorithms for Clusters of Workstations", 2009
- two trees: Sanders, Speck, Traff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and
  Scan", 2009; NCCL chooses between rings and such trees (its NCCL_ALGO, since 2.4)
"""

import math
from dataclasses import dataclass

MIB = 1 << 20
# The library's caps of the first bucket and of the others, where bucket_cap_mb is not set.
DEFAULT_CAPS = (1 * MIB, 25 * MIB)


@dataclass(frozen=True)
class Link:
    """Between two hosts: a message of n bytes takes alpha + beta * n."""

    alpha: float
    beta: float


def ring(size, ranks, link):
    return 2 * (ranks - 1) * (link.alpha + size / ranks * link.beta)


def recursive_doubling(size, ranks, link):
    return math.ceil(math.log2(ranks)) * (link.alpha + size * link.beta)


def halving_doubling(size, ranks, link):
    """Rabenseifner's: a reduce-scatter by halving, an all-gather by doubling."""
    share = 2 * (ranks - 1) / ranks
    return 2 * math.ceil(math.log2(ranks)) * link.alpha + share * size * link.beta


def two_trees(size, ranks, link):
    """Two trees: each carries half of the bytes up and down, in chunks of the best size.

    A tree of depth d passes k chunks in 2 d + 2 (k - 1) rounds, of which each takes
    alpha + size / k * beta; the k that minimizes that is sqrt((d - 1) size beta / alpha).
    """
    depth = math.ceil(math.log2(ranks))
    chunks = max(1.0, math.sqrt((depth - 1) * size * link.beta / link.alpha)) if link.alpha else 1e6
    return 2 * (depth + chunks - 1) * (link.alpha + size / chunks * link.beta)


ALGORITHMS = {
    "ring": ring,
    "recursive doubling": recursive_doubling,
    "halving and doubling": halving_doubling,
    "two trees": two_trees,
}


def solve(matrix, right):
    """The solution of a small system of linear equations; None where it is not unique."""
    rows = [list(row) + [value] for row, value in zip(matrix, right)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-300:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(size):
            if r != column:
                factor = rows[r][column] / rows[column][column]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column])]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def fit_relative(terms, values):
    """Coefficients, none below 0, for which sum(terms * coefficients) is nearest to the values.

    Distances are relative to each value, so that microseconds count as much as seconds. A term that
    would need a coefficient below 0 is left out.
    """
    # The columns differ by ten orders of magnitude: bytes beside ones.
    count = len(terms[0])
    scales = [max(abs(row[i] / value) for row, value in zip(terms, values)) or 1 for i in range(count)]
    relative = [[row[i] / value / scales[i] for i in range(count)] for row, value in zip(terms, values)]
    used = list(range(count))
    while used:
        matrix = [[sum(row[i] * row[j] for row in relative) for j in used] for i in used]
        found = solve(matrix, [sum(row[i] for row in relative) for i in used])
        if found is not None and min(found) >= 0:
            coefficients = dict(zip(used, found))
            return [coefficients.get(i, 0.0) / scales[i] for i in range(count)]
        used.remove(used[-1] if found is None else used[found.index(min(found))])
    return [0.0] * count


def fit_line(points):
    """(intercept, slope, r^2) of least squares through (x, y)."""
    n = len(points)
    mean_x, mean_y = (sum(values) / n for values in zip(*points))
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    slope = xy / xx
    return mean_y - slope * mean_x, slope, xy * xy / (xx * yy) if yy else 1.0


def fit_all_reduce(points):
    """Fits a link to (bytes, seconds) of all-reduces between two ranks: 2 alpha + n beta."""
    alpha, beta = fit_relative([(2, size) for size, _ in points], [time for _, time in points])
    return Link(alpha, beta)


@dataclass(frozen=True)
class Wires:
    """Links of any rate, between hosts that need processor time for each byte."""

    alpha: float
    wire: float  # bytes on the wire for each byte of payload
    host: float  # s a byte, at best

    def is_slower_than_host(self, gigabits):
        return self.wire * 8e-9 / gigabits >= self.host

    def link(self, gigabits):
        """Hosts and wire work at the same time, so the slower one sets the time."""
        return Link(self.alpha, max(self.wire * 8e-9 / gigabits, self.host))


def fit_wires(points, host):
    """Fits wires to (Gbit/s, bytes, seconds) of all-reduces between two ranks.

    host: seconds a byte without a wire, between two processes of one host. Links on which a byte
    takes less than twice that are left out, unless there are no others: there the hosts add to the
    measured time.
    """
    points = [one for one in points if 8e-9 / one[0] >= 2 * host] or points
    terms = [(2, size * 8e-9 / rate) for rate, size, _ in points]
    return Wires(*fit_relative(terms, [time for _, _, time in points]), host)


@dataclass(frozen=True)
class Profile:
    """A step that sends nothing: (bytes, when ready) of each gradient, by that time."""

    forward: float
    step: float
    gradients: tuple

    @property
    def backward_end(self):
        return self.gradients[-1][1]

    def scaled(self, step):
        """The same profile on a machine where the step takes that long."""
        factor = step / self.step
        gradients = tuple((size, ready * factor) for size, ready in self.gradients)
        return Profile(self.forward * factor, step, gradients)


def plan(gradients, caps):
    """(bytes, when its last gradient is ready) of each bucket, which closes when it reaches its cap."""
    buckets, filled = [], 0
    for size, ready in gradients:
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append((filled, ready))
            filled = 0
    if filled:
        buckets.append((filled, gradients[-1][1]))
    return buckets


@dataclass(frozen=True)
class Step:
    time: float
    communication: float  # all buckets, one after the other
    overlapped: float  # bytes that were sent during backward
    last: float  # the last bucket's all-reduce
    queued: float  # how long the last bucket waited for the one before


def step(profile, caps, all_reduce, taken=0.0):
    """Adds all-reduces, one at a time and in the order of the buckets, to the backward pass.

    all_reduce: seconds of an all-reduce of so many bytes. taken: seconds by which sending a byte
    delays backward, where both share a core: Wires.host.
    """
    wire_free, communication, overlapped = 0.0, 0.0, 0.0
    end = profile.backward_end
    for size, ready in plan(profile.gradients, caps):
        start = max(ready, wire_free)
        last, queued = all_reduce(size), start - ready
        wire_free = start + last
        communication += last
        overlapped += size * min(1.0, max(0.0, end - start) / last) if last else size
    after_backward = profile.step - end
    time = max(end, wire_free) + taken * overlapped + after_backward
    return Step(time, communication, overlapped, last, queued)


NEGLIGIBLE = 0.02  # of a step: exposed communication that no measurement tells from noise


@dataclass(frozen=True)
class Cost:
    """The cost of a step, with the best algorithm and bucket cap of those tried."""

    time: float
    compute: float
    algorithm: str
    cap: int
    limit: str

    @property
    def ratio(self):
        return self.time / self.compute


def limit_of(profile, cost, latency_share):
    """Names what limits the speed of a step.

    compute: communication is hidden. last bucket: only that one is exposed, the wire was free for
    it. overlap: the wire is fast enough for a step, but still busy with earlier buckets when the
    last one is ready. latency, bandwidth: messages take longer than the whole computation, mostly
    because of their number or of their bytes.
    """
    if cost.time <= (1 + NEGLIGIBLE) * profile.step:
        return "compute"
    if latency_share > 0.5:
        return "latency"
    if cost.communication > profile.step:
        return "bandwidth"
    return "overlap" if cost.queued > cost.last else "last bucket"


# NCCL's algorithms. Halving and doubling is cheaper in this model, but NCCL does not have it: its
# partners change with every message.
IN_USE = ("ring", "two trees")


def best_step(profile, ranks, link, caps_mib=(1, 2, 5, 10, 25, 50, 100), algorithms=IN_USE):
    """The cheapest of the algorithms and bucket caps, as a tuner would find it."""
    tried = [
        (step(profile, (cap * MIB,), lambda size: ALGORITHMS[name](size, ranks, link)), name, cap)
        for name in algorithms
        for cap in caps_mib
    ]
    cost, name, cap = min(tried, key=lambda one: one[0].time)
    without_latency = Link(0.0, link.beta)
    bytes_only = step(
        profile, (cap * MIB,), lambda size: ALGORITHMS[name](size, ranks, without_latency)
    )
    latency_share = 1 - bytes_only.communication / cost.communication
    limit = limit_of(profile, cost, latency_share)
    return Cost(cost.time, profile.step, name, cap, limit)


def uniform_profile(parameters, bytes_each, layers, forward, backward):
    """A model of equal layers, whose gradients are ready at equal distances during backward."""
    size = parameters * bytes_each // layers
    gradients = tuple((size, forward + backward * (i + 1) / layers) for i in range(layers))
    return Profile(forward, forward + backward, gradients)
