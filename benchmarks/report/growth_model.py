"""The section of GROWTH.md with the cost model: fitted, checked, and extrapolated."""

import json
import pathlib
import sys
from dataclasses import dataclass

import svg
import tables
from growth_page import link_folders, read_lines

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "costs"))
import cost_model

RATES = (25, 100, 400)
RANKS = tuple(8 << i for i in range(10))  # to 4096
SHOWN_RANKS = (8, 64, 512, 4096)
# At most the burst of bench_link.sh's traffic shaper: a shorter message is not slowed down by it.
BURST = 256 << 10
# Assumed, not measured: the latency of a network adapter that reads and writes memory itself.
ADAPTER_ALPHA = 10e-6
# Also assumed: a language model on a GPU, whose backward takes twice as long as its forward.
LARGE = {
    "parameters": 1_000_000_000, "bytes": 2, "layers": 96, "tokens": 16384, "flops": 400e12,
}

FORMULAS = """## On paper

A model in `costs/cost_model.py`, whose constants are fitted to the figures above. A message of n
bytes takes alpha + beta n seconds. An all-reduce over p ranks, each on a host of its own, takes

| | seconds | |
| --- | --- | --- |
| ring | 2 (p - 1) alpha + 2 (p - 1) / p n beta | the fewest bytes [2]; what Gloo does |
| recursive doubling | log2 p (alpha + n beta) | the fewest messages [1] |
| halving and doubling | 2 log2 p alpha + 2 (p - 1) / p n beta | [1], Rabenseifner's |
| two trees | 2 (log2 p + k - 1) (alpha + n beta / k) | in k chunks, the best number of them [3]; as NCCL's trees [4] |

beta is the slower of what a byte takes on the wire, w * 8 / rate, and what the two hosts need for it
themselves, h. Bucket b leaves when its last gradient is ready and the bucket before has arrived:

    start(b) = max(ready(b), end(b - 1))        end(b) = start(b) + T(bytes(b), p)
    step     = max(end of backward, end(last)) + optimizer + h * (bytes under way during backward)

ready(b) comes from `costs profile`, which notes when each gradient of a step without communication
is there, scaled to `none` of the process compared with; buckets are the library's (a bucket closes
once it has its cap). h counts twice, because a byte that a core sends, receives and adds up while it
should compute delays that computation. alpha is fitted to messages of 4 KiB, which pass in the burst of
the link's shaper, w to those of 1 MiB and more, h to Gloo's of 1 MiB and more on one host; steps are not
fitted to. Not in the model: how unevenly ranks compute, for all wait for the slowest; other traffic;
the reducer's own time. How costs grow with p is from the literature: no more than two hosts were there.

[1] Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005. [2] Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", JPDC 69(2), 2009. [3] Sanders, Speck, Traff, "Two-tree Algorithms for Full Bandwidth
Broadcast, Reduction and Scan", Parallel Computing 35(12), 2009. [4] NCCL's documentation, "NCCL_ALGO",
and nccl-tests' doc/PERFORMANCE.md for the ring's factor 2 (p - 1) / p."""


@dataclass(frozen=True)
class Measured:
    """A measured step over a link."""

    rate: float
    model: str
    mode: str
    cap: float  # MiB; None: the library's default
    step: float
    compute: float

    def caps(self):
        return cost_model.DEFAULT_CAPS if self.cap is None else (self.cap * cost_model.MIB,)

    def on_paper(self, profiles, wires):
        profile, link = profiles[self.model].scaled(self.compute), wires.link(self.rate)
        return cost_model.step(
            profile, self.caps(), lambda size: cost_model.ring(size, 2, link), wires.host
        )


def read_profiles(folder):
    profiles = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        gradients = tuple((size, ready * 1e-3) for size, ready in record["gradients"])
        profiles[record["model"]] = cost_model.Profile(
            record["forward_ms"] * 1e-3, record["step_ms"] * 1e-3, gradients
        )
    return profiles


def read_all_reduces(results):
    """(Gbit/s, bytes, seconds) of each all-reduce; 0 bytes where the shaper had no effect."""
    return [
        (rate, record["bytes"] if record["bytes"] > BURST else 0, record["us"] * 1e-6)
        for rate, folder in link_folders(results)
        for record in read_lines(folder / "all_reduce")
    ]


def read_steps(results, profiles):
    steps = []
    for rate, folder in link_folders(results):
        for record in tables.read_lines(folder):
            if record["mode"] in ("ddp", tables.TUNED) and record["model"] in profiles:
                seconds = record["step_ms"] * 1e-3, record["compute_ms"] * 1e-3
                cap = record["bucket_cap_mb"]
                steps.append(Measured(rate, record["model"], record["mode"], cap, *seconds))
    return steps


def host_seconds_a_byte(results):
    """Fitted to all-reduces over Gloo on one host, of 1 MiB or more like buckets; None without any."""
    points = [
        (record["bytes"], record["us"] * 1e-6)
        for record in read_lines(results / "collectives")
        if record["what"] == "gloo" and record["bytes"] >= cost_model.MIB
    ]
    if not points:
        return None
    return cost_model.fit_relative([(size,) for size, _ in points], [time for _, time in points])[0]


def check(host, profiles, steps, all_reduces):
    """Rows that compare each rate's steps with a model fitted without that rate; and the errors."""
    rows, errors = [], []
    rates = sorted({s.rate for s in steps})
    for rate in rates if len(rates) > 1 else []:
        wires = cost_model.fit_wires([a for a in all_reduces if a[0] != rate], host)
        for measured in (s for s in steps if s.rate == rate):
            paper = measured.on_paper(profiles, wires).time
            error = paper / measured.step - 1
            errors.append(abs(error))
            cap = "default" if measured.cap is None else f"{measured.cap:g} MiB"
            rows.append([
                f"{rate:g}", measured.model, measured.mode, cap, f"{1e3 * measured.compute:.0f}",
                f"{1e3 * measured.step:.0f}", f"{1e3 * paper:.0f}", f"{100 * error:+.0f}%",
            ])
    return rows, errors


def lower_bounds(profiles, steps, wires):
    """{model: (over the wire alone, over none)} on paper, of the steps at 1 Gbit/s with a tuned cap."""
    bounds = {}
    for measured in steps:
        if measured.rate == 1 and measured.mode == tables.TUNED:
            size = sum(size for size, _ in profiles[measured.model].gradients)
            alone = cost_model.ring(size, 2, wires.link(measured.rate))
            paper = measured.on_paper(profiles, wires).time
            both = paper / alone, paper / measured.compute
            bounds[measured.model] = min(both, bounds.get(measured.model, both))
    return bounds


def bounds_text(bounds):
    if not bounds:
        return ""
    listed = ", ".join(
        f"{model} {over_wire:.3f} x the wire alone and {over_none:.3f} x none"
        for model, (over_wire, over_none) in bounds.items()
    )
    return (
        "Forward, the backward pass up to the first bucket, and the optimizer are what no schedule of "
        "buckets hides behind the wire, nor the wire behind a shorter backward pass. So on paper, with "
        f"the tuned cap, a step at 1 Gbit/s takes here: {listed}."
    )


def large_profile():
    flops = LARGE["parameters"] * LARGE["tokens"]
    forward, backward = 2 * flops / LARGE["flops"], 4 * flops / LARGE["flops"]
    return cost_model.uniform_profile(
        LARGE["parameters"], LARGE["bytes"], LARGE["layers"], forward, backward
    )


def carry_on(page, profiles, wires):
    models = dict(profiles)
    models["1B"] = large_profile()
    adapter = cost_model.Wires(ADAPTER_ALPHA, wires.wire, 0.0)

    def cells(profile, link):
        for ranks in SHOWN_RANKS:
            cost = cost_model.best_step(profile, ranks, link)
            yield f"{cost.ratio:.3f}, {cost.algorithm}, {cost.cap} MiB: {cost.limit}"

    rows = []
    for name, profile in models.items():
        if name != "1B":
            rows.append([name, "TCP, any", *cells(profile, wires.link(RATES[0]))])
        for rate in RATES:
            rows.append([name, f"{rate}", *cells(profile, adapter.link(rate))])
        draw(page, name, profile, adapter)
    page.text(tables.table(["model", "Gbit/s", *(f"{r} ranks" for r in SHOWN_RANKS)], rows))


def draw(page, name, profile, adapter):
    def ratios(rate, algorithms):
        link = adapter.link(rate)
        return [
            cost_model.best_step(profile, ranks, link, algorithms=algorithms).ratio
            for ranks in RANKS
        ]

    series = [(f"{rate} Gbit/s", ratios(rate, cost_model.IN_USE)) for rate in RATES]
    series.append((f"{RATES[-1]}, ring only", ratios(RATES[-1], ("ring",))))
    page.picture(
        f"model_{name}.svg",
        svg.line_chart(
            f"{name}: a step over its computation, on paper", [str(r) for r in RANKS], series,
            "ranks, one a host", "step / computation",
        ),
        f"steps of {name} over their computation, by the number of ranks, on paper",
    )


def constants_text(wires):
    return (
        f"Fitted: alpha {1e6 * wires.alpha:.0f} us, w {wires.wire:.3f} (the wire carries "
        f"{100 / wires.wire:.1f}% payload), h {1e9 * wires.host:.2f} ns a byte ("
        f"{8e-9 / wires.host:.1f} Gbit/s, from Gloo between two processes of this host)."
    )


def add(page, results):
    profiles = read_profiles(results / "model")
    all_reduces = read_all_reduces(results)
    steps = read_steps(results, profiles)
    host = host_seconds_a_byte(results)
    if not (profiles and all_reduces and steps and host):
        return
    wires = cost_model.fit_wires(all_reduces, host)
    page.text(FORMULAS)
    page.paragraph(constants_text(wires))
    rows, errors = check(host, profiles, steps, all_reduces)
    if rows:
        page.paragraph(
            "The check: each rate's steps as the model has them when all figures of that rate are "
            f"left out of the fit. The mean error is {100 * sum(errors) / len(errors):.0f}%, the "
            f"largest {100 * max(errors):.0f}%."
        )
        columns = ["Gbit/s", "model", "mode", "cap", "none, ms", "measured, ms", "on paper, ms", ""]
        page.text(tables.table(columns, rows))
    page.paragraph(bounds_text(lower_bounds(profiles, steps, wires)))
    page.text("### From 8 to 4096 ranks")
    page.paragraph(
        "A step over its computation, with the cheaper of ring and two trees, which NCCL has, the best "
        "bucket cap of 1 to 100 MiB, and what limits it: *compute* (all but 2% is hidden), *last bucket* (nothing but that is "
        "exposed), *overlap* (the wire would do, but is still busy with earlier buckets when the last "
        "one is ready), *bandwidth* and *latency* (bytes, or the number of messages, take longest). "
        "The benchmark's models compute as on one core here. Their line \"TCP, any\" has hosts that "
        "need as long for a byte as these two: then the host is the limit and any rate above "
        f"{8e-9 / wires.host:.0f} Gbit/s comes to the same. The other lines assume an "
        f"adapter that spares the host all of it, and alpha = {1e6 * ADAPTER_ALPHA:.0f} us. 1B "
        f"assumes {LARGE['parameters']:.0e} parameters of {LARGE['bytes']} bytes in "
        f"{LARGE['layers']} equal parts, {LARGE['tokens']} tokens a rank and step, and a GPU that "
        f"does {LARGE['flops'] / 1e12:.0f} TFLOP/s of 6 FLOP a parameter and token: "
        f"{1e3 * large_profile().step:.0f} ms. None of it was measured at these ranks and rates."
    )
    carry_on(page, profiles, wires)
