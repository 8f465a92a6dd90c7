"""The section of GROWTH.md with ddp_plan's steps: beside those over links, and at more ranks."""

import json
import re
import statistics
import subprocess
from dataclasses import dataclass

import tables
from growth_page import link_folders, read, read_lines

RATES = (25, 100, 400)
RANKS = (8, 64, 512, 4096)
# Assumed, not measured: the latency of a network adapter that reads and writes memory itself.
ADAPTER_US = 10

WORDS = """## ddp_plan

[`ddp_plan`](../docs/3d.md#ddp_plan) beside the steps above. It plans transformers, and so gets each
model as one layer with its parameters, whose forward and backward take `none` of the process
compared with. A link has the rate of one TCP connection over it, and the latency of all links is half of
an all-reduce of {size}: {latency:.0f} us. No rate is fitted to steps. `ddp_plan` reduces gradients during
the backward pass, two thirds of `none`, but for the last bucket, of 25 MiB; buckets of other sizes,
what a host needs for each byte that it sends, and how unevenly ranks compute are not in it. An
all-reduce is a ring [1], with the fewest bytes possible [2]."""

SOURCES = """[1] Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005. [2] Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", JPDC 69(2), 2009."""

MORE_RANKS = """A step over its computation, as `ddp_plan` has it, with one rank a host, a network of the
rate with a latency of {latency} us, and the median of `none` of the steps above. None of it was measured
at these ranks and rates."""


@dataclass(frozen=True)
class Measured:
    """A measured step over a link."""

    rate: float
    carried: float  # Gbit/s of one TCP connection
    model: str
    mode: str
    cap: float  # MiB; None: the library's default
    step: float  # s, as `compute`
    compute: float
    bytes: int  # of gradients


def read_steps(results):
    steps = []
    for rate, folder in link_folders(results):
        carried = re.search(r"carries ([0-9.]+) Gbit/s", read(folder / "rate.txt"))
        for record in tables.read_lines(folder) if carried else []:
            if record["mode"] in ("ddp", tables.TUNED):
                steps.append(Measured(
                    rate, float(carried[1]), record["model"], record["mode"],
                    record["bucket_cap_mb"], record["step_ms"] * 1e-3, record["compute_ms"] * 1e-3,
                    record["bytes"],
                ))
    return steps


def latency_of_links(results):
    """(bytes of the smallest all-reduce, half of its time in us); None without any."""
    records = [r for _, folder in link_folders(results) for r in read_lines(folder / "all_reduce")]
    if not records:
        return None
    size = min(record["bytes"] for record in records)
    return size, statistics.mean(r["us"] for r in records if r["bytes"] == size) / 2


def planned(program, measured, ranks, gigabits, latency_us):
    """Seconds of the step with so many ranks, one a host."""
    parameters = measured.bytes // 4
    options = {
        "parameters": parameters, "layers": 1, "hidden": 1, "heads": 1, "sequence": 1, "batch": ranks,
        "ranks": ranks, "hosts": ranks, "memory": 1e6, "network": gigabits / 8,
        "network-us": latency_us,
        # A sample's forward takes 2 operations a parameter, its backward 4.
        "gflops": 6e-9 * parameters / measured.compute,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    answer = subprocess.run([program, "--json", *words], check=True, capture_output=True, text=True)
    plans = json.loads(answer.stdout)["plans"]
    return next(plan["seconds"]["total"] for plan in plans if not plan["fsdp"])


def compare(program, steps, latency_us):
    """The rows of each measured step beside the planned one, and their relative errors."""
    rows, errors = [], []
    for measured in steps:
        seconds = planned(program, measured, 2, measured.carried, latency_us)
        error = seconds / measured.step - 1
        errors.append(abs(error))
        cap = "default" if measured.cap is None else f"{measured.cap:g} MiB"
        rows.append([
            f"{measured.rate:g}", measured.model, measured.mode, cap, f"{1e3 * measured.compute:.0f}",
            f"{1e3 * measured.step:.0f}", f"{1e3 * seconds:.0f}", f"{100 * error:+.0f}%",
        ])
    return rows, errors


def extrapolate(program, steps):
    """The rows of each model and rate at more ranks."""
    rows = []
    for model in dict.fromkeys(step.model for step in steps):
        of_model = [step for step in steps if step.model == model]
        typical = statistics.median_low(step.compute for step in of_model)
        step = next(step for step in of_model if step.compute == typical)
        for rate in RATES:
            times = [planned(program, step, ranks, rate, ADAPTER_US) for ranks in RANKS]
            rows.append([model, str(rate), *(f"{time / step.compute:.3f}" for time in times)])
    return rows


def add(page, results, program):
    """\\param program: ddp_plan."""
    steps, latency = read_steps(results), latency_of_links(results)
    if not steps or not latency:
        return
    size, latency_us = latency
    title, words = WORDS.format(size=f"{size / 1024:g} KiB", latency=latency_us).split("\n\n")
    page.text(title)
    page.paragraph(words)
    page.paragraph(SOURCES)
    rows, errors = compare(program, steps, latency_us)
    page.paragraph(
        f"The mean error is {100 * sum(errors) / len(errors):.0f}%, the largest "
        f"{100 * max(errors):.0f}%."
    )
    columns = ["Gbit/s", "model", "mode", "cap", "none, ms", "measured, ms", "ddp_plan, ms", ""]
    page.text(tables.table(columns, rows))
    page.text("### From 8 to 4096 ranks")
    page.paragraph(MORE_RANKS.format(latency=ADAPTER_US))
    page.text(tables.table(
        ["model", "Gbit/s", *(f"{ranks} ranks" for ranks in RANKS)], extrapolate(program, steps)
    ))
