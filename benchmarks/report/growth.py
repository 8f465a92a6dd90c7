"""Writes GROWTH.md and its pictures from the measurements of scripts/bench_growth.sh.

usage: growth.py RESULTS_FOLDER OUTPUT_FOLDER DDP_PLAN

RESULTS_FOLDER holds machine.txt and a folder for each section: collectives/*.jsonl,
parameters/*.jsonl, ranks/*.jsonl, setup/*.jsonl, and link_<rate>/*.jsonl with all_reduce/*.jsonl and
rate.txt; missing parts are left out. DDP_PLAN is the program.
"""

import pathlib
import statistics
import sys

import growth_plan
import svg
import tables
from growth_page import Page, link_folders, read, read_lines

FOREWORD = """# How cost grows

Of `scripts/bench_growth.sh`, which writes this page and its plots; [RESULTS.md](RESULTS.md) has the
steps of each model and mode, [README.md](README.md) what a step is and how modes take turns. Times
depend on the machine and on what else it does: judge ratios and shapes. A rank has one thread."""

COLLECTIVES = """## Bytes: an all-reduce beside memcpy

Two ranks on this host sum floats in place, the same tensor again and again. GB/s are the tensor's
bytes over the median time; on two ranks nccl-tests' "bus bandwidth" is the same number. "shm" is a
tensor in ordinary memory, "shm, its memory" one that the backend has allocated, as buckets are. With
"memcpy" both ranks copy as many bytes at the same time; what fits into their caches stays there.
`MPI_Allreduce` is {mpi}, a peer that was installed by hand (Debian's libopenmpi-dev and openmpi-bin;
`setup.sh` does not) and spins while it waits."""

PARAMETERS = """## Parameters

What the wrapper adds to forward and backward on {ranks} ranks: parameters of 16 floats, so that hooks,
buckets and copies are all that there is. Above none is the median over rounds of the difference to a
step of `none` in the same round; it must be linear in the number of parameters. A step of `none` is
not quite: what a parameter drags along (tensors, their storages, nodes of the graph) takes kilobytes,
and from some number on no cache holds all of them, nor what the wrapper has for each."""

RANKS = """## Ranks on this host

Steps over those of `none` at the same number of ranks, in the same process. This host has {cores}
cores, so more ranks than that take turns on them: a collective then waits for ranks that are not
running, and `none` waits in its barrier as well. `c10d over Gloo` is what LibTorch alone offers; the
other columns go through shared memory."""

SETUP = """## Setting up

Seconds to make a group with a first barrier, and from there to wrap a model of 8 parameters and 1 MiB
with another barrier: of the slowest rank, median of some runs. All ranks are processes of this host,
which have loaded LibTorch before."""

SPAWNED = """### More ranks than a host has memory for

LibTorch for CUDA fills 177 MB of memory that no other process shares before `main()` (see
[README.md](README.md)). Ranks that [`spawn`](../docs/launching.md#in-one-program) makes are copies of
one process, and share it. Over shared memory; a step is a forward and a backward pass with a barrier.
MB are what each rank adds once it has made a step: memory that only it has, with its page tables, and
the same by what the host had available before and has then."""

LINKS = """## Two hosts

A rank in each of two network namespaces that a link of the rate joins, over Gloo, by
`scripts/bench_link.sh --short`; [README.md](README.md) says how the link is held to its rate.
"The wire alone" is one all-reduce of all gradients, as mode `flat` sends it, in the same process."""

WIRE_TARGET, STEP_TARGET = 1.05, 1.12  # at 1 Gbit/s: mlp over the wire, resnet18 over none


def size_name(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def fit_all_reduce(points):
    """(alpha, beta), none below 0, for which 2 alpha + n beta is nearest to (bytes, seconds) of points.

    Distances are relative to each time, so that microseconds count as much as seconds.
    """
    alphas, betas = [2 / time for _, time in points], [size / time for size, time in points]
    aa, bb = sum(a * a for a in alphas), sum(b * b for b in betas)
    ab, a1, b1 = sum(a * b for a, b in zip(alphas, betas)), sum(alphas), sum(betas)
    determinant = aa * bb - ab * ab
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if alpha < 0:
        return 0.0, b1 / bb
    return (alpha, beta) if beta >= 0 else (a1 / aa, 0.0)


def fit_line(points):
    """(intercept, slope, r^2) of least squares through (x, y)."""
    x, y = zip(*points)
    slope, intercept = statistics.linear_regression(x, y)
    return intercept, slope, statistics.correlation(x, y) ** 2


def add_collectives(page, results):
    lines = read_lines(results / "collectives")
    if not lines:
        return
    times = {}
    for record in lines:
        times.setdefault(record["what"], {})[record["bytes"]] = record["us"]
    kinds = [k for k in ("memcpy", "shm", "shm, its memory", "gloo", "openmpi") if k in times]
    sizes = sorted({size for of_kind in times.values() for size in of_kind})

    def rate(kind, size):
        us = times[kind].get(size)
        return size / us / 1e3 if us else None

    mpi = read(results / "collectives" / "openmpi.txt") or "Open MPI's, which this machine lacks"
    title, words = COLLECTIVES.format(mpi=mpi).split("\n\n")
    page.text(title)
    page.paragraph(words)
    series = [(kind, [rate(kind, size) for size in sizes]) for kind in kinds]
    page.picture(
        "all_reduce.svg",
        svg.line_chart(
            "An all-reduce between two ranks of one host", [size_name(s) for s in sizes], series,
            "bytes of the tensor", "GB/s", svg.logarithmic_axis,
        ),
        "GB/s of an all-reduce by bytes",
    )

    def cell(kind, size):
        value = rate(kind, size)
        return f"{value:.3g}" if value else ""

    rows = [[size_name(size), *(cell(kind, size) for kind in kinds)] for size in sizes]
    page.text(tables.table(["GB/s", *kinds], rows))
    page.paragraph(
        "alpha + beta n, fitted to the times of all sizes relative to each. Caches, and how a waiting "
        "rank is woken, fit no line."
    )
    rows = []
    for kind in kinds:
        points = [(size, us * 1e-6) for size, us in times[kind].items()]
        alpha, beta = fit_all_reduce(points)
        apart = [abs((2 * alpha + size * beta) / time - 1) for size, time in points]
        rows.append([
            kind, f"{2e6 * alpha:.3g}", f"{1e-9 / beta:.3g}" if beta else "-",
            f"{100 * sum(apart) / len(apart):.0f}%", f"{100 * max(apart):.0f}%",
        ])
    page.text(tables.table(["", "latency, us", "GB/s", "mean error", "largest"], rows))


def add_parameters(page, results):
    lines = read_lines(results / "parameters")
    if not lines:
        return
    above = {}
    for record in lines:
        if record["mode"] != "none":
            above.setdefault(record["mode"], {})[record["parameters"]] = record["above_none_us"]
    steps = {r["parameters"]: r["step_us"] for r in lines if r["mode"] == "none"}
    modes, counts = sorted(above, reverse=True), sorted(steps)
    page.text(PARAMETERS.format(ranks=lines[0]["ranks"]))
    page.picture(
        "parameters.svg",
        svg.line_chart(
            "What a step of tiny parameters takes above none", [str(count) for count in counts],
            [(m, [max(above[m][c], 0.1) if c in above[m] else None for c in counts]) for m in modes],
            "parameters", "us", svg.logarithmic_axis,
        ),
        "microseconds above none by the number of parameters",
    )
    def cells(count):
        yield str(count)
        yield f"{steps[count]:.0f}"
        yield f"{1e3 * steps[count] / count:.0f}"
        for mode in modes:
            yield f"{above[mode][count]:.0f}"
            yield f"{1e3 * above[mode][count] / count:.0f}"
            yield f"{100 * above[mode][count] / steps[count]:.0f}%"

    columns = ["parameters", "none, us", "ns each"]
    columns += [name for m in modes for name in (f"{m} above, us", "ns each", "of none")]
    page.text(tables.table(columns, [list(cells(count)) for count in counts]))
    rows = []
    for mode in modes:
        start, slope, r2 = fit_line(sorted(above[mode].items()))
        linear = "linear" if r2 >= 0.99 else "NOT LINEAR"
        rows.append([mode, f"{1e3 * slope:.0f}", f"{start:.0f}", f"{r2:.4f}", linear])
    page.text("A line of least squares through these, linear where r^2 is at least 0.99:")
    page.text(tables.table(["", "ns a parameter", "us without any", "r^2", ""], rows))


def add_ranks(page, results):
    folder = results / "ranks"
    if not folder.is_dir():
        return
    lines = tables.read_lines(folder)
    ways = [("ddp", "ddp", "shm"), ("c10d", "c10d", "shm"), ("c10d over Gloo", "c10d", "gloo")]
    ratios, none_ms = {}, {}
    for record in lines:
        over = "gloo" if record["process"].endswith("-gloo.jsonl") else "shm"
        key = record["model"], record["world"]
        if record["mode"] == "none" and over == "shm":
            none_ms[key] = record["step_ms"]
        for name, mode, backend in ways:
            if (mode, backend) == (record["mode"], over):
                ratios[key + (name,)] = record["step_ms"] / record["compute_ms"]
    page.text(RANKS.format(cores=read(results / "cores.txt") or "few"))
    names = [name for name, _, _ in ways]
    worlds = sorted({world for _, world in none_ms})
    rows = []
    for model in tables.models_of(lines):
        series = [(name, [ratios.get((model, w, name)) for w in worlds]) for name in names]
        page.picture(
            f"ranks_{model}.svg",
            svg.line_chart(
                f"{model}: a step over none", [str(w) for w in worlds], series, "ranks", "step / none"
            ),
            f"steps of {model} over none, by the number of ranks",
        )
        for world in worlds:
            if (model, world) in none_ms:
                cells = [ratios.get((model, world, name)) for name in names]
                rows.append(
                    [model, str(world), f"{none_ms[model, world]:.1f}"]
                    + [f"{value:.3f}" if value else "" for value in cells]
                )
    page.text(tables.table(["model", "ranks", "none, ms", *names], rows))


def add_setup(page, results):
    all_lines = read_lines(results / "setup")
    if not all_lines:
        return
    lines = [record for record in all_lines if "own_mb" not in record]
    page.text(SETUP)
    kinds = list(dict.fromkeys(record["kind"] for record in lines))
    times = {(r["kind"], r["ranks"]): r for r in lines}
    worlds = sorted({record["ranks"] for record in lines})
    for part, title in (("init", "Making a group"), ("wrap", "Wrapping a model")):
        def seconds(kind, world):
            record = times.get((kind, world))
            return max(record[f"{part}_s"], 1e-5) if record else None

        series = [(kind, [seconds(kind, world) for world in worlds]) for kind in kinds]
        page.picture(
            f"setup_{part}.svg",
            svg.line_chart(
                f"{title} of ranks of one host", [str(w) for w in worlds], series, "ranks", "s",
                svg.logarithmic_axis,
            ),
            f"{title.lower()}: seconds by the number of ranks",
        )

    def cells(kind, world):
        record = times.get((kind, world))
        return [f"{record['init_s']:.3f}", f"{record['wrap_s']:.3f}"] if record else ["", ""]

    rows = [[str(w)] + [cell for kind in kinds for cell in cells(kind, w)] for w in worlds]
    columns = ["ranks"] + [name for kind in kinds for name in (f"{kind}, s", "wrap, s")]
    page.text(tables.table(columns, rows))
    add_spawned(page, [record for record in all_lines if "own_mb" in record])


def add_spawned(page, lines):
    if not lines:
        return
    page.text(SPAWNED)
    rows = [
        [str(r["ranks"])]
        + [f"{r[part]:.3f}" for part in ("init_s", "wrap_s", "step_s")]
        + [f"{r[part]:.1f}" for part in ("own_mb", "host_mb")]
        for r in sorted(lines, key=lambda record: record["ranks"])
    ]
    page.text(tables.table(["ranks", "group, s", "wrap, s", "step, s", "own, MB", "host, MB"], rows))


def over_none(row):
    return statistics.median(r["step_ms"] / r["compute_ms"] for r in row.records)


def link_targets(lines):
    rows = []
    wire = "the wire alone", WIRE_TARGET, tables.Row.over_alone
    goals = [("mlp", "ddp", *wire), ("mlp", tables.TUNED, *wire)]
    goals.append(("resnet18", tables.TUNED, "none", STEP_TARGET, over_none))
    for model, mode, over, most, value_of in goals:
        row = next((r for r in tables.rows_of(lines, model) if r.mode == mode and r.cap is None), None)
        value = value_of(row) if row else None
        if value is None:
            continue
        rows.append([model, mode, f"{value:.3f} x {over}", f"{most}", tables.verdict(value, most)])
    return tables.table(["model", "mode", "a step", "at most", ""], rows)


def link_tuning(rate, lines):
    """For each model, ddp_tuned's step beside that of the best size of the sweep."""
    for model in tables.models_of(lines):
        records = [r for r in lines if r["model"] == model]
        swept = [r for r in tables.rows_of(records, model) if r.mode == "ddp" and r.cap is not None]
        tuned = [r for r in records if r["mode"] == tables.TUNED]
        if not swept or not tuned:
            continue
        processes = {record["process"] for row in swept for record in row.records}
        tuned = tables.Row([r for r in tuned if r["process"] in processes] or tuned)
        best = min(swept, key=lambda row: row.median("step_ms"))
        apart = tuned.median("step_ms") / best.median("step_ms")
        enough = len(swept) >= tables.FEWEST_SIZES
        yield [
            f"{rate:g}", model, tuned.caps(), f"{tuned.median('step_ms'):.0f}", best.caps(),
            f"{best.median('step_ms'):.0f}", f"{100 * (apart - 1):+.1f}%",
            tables.verdict(apart, tables.TUNED_TARGET) if enough else "",
        ]


def add_links(page, results):
    folders = link_folders(results)
    if not folders:
        return
    page.text(LINKS)
    tuning, steps = [], []
    for rate, folder in folders:
        lines = tables.read_lines(folder)
        page.paragraph(f"At {rate:g} Gbit/s: " + read(folder / "rate.txt"))
        if rate == 1:
            page.text(link_targets(lines))
        tuning += link_tuning(rate, lines)
        for model in tables.models_of(lines):
            for row in tables.rows_of(lines, model):
                over = row.over_alone()
                steps.append([
                    f"{rate:g}", model, row.name(), f"{row.median('step_ms'):.0f}",
                    f"{over_none(row):.3f}", f"{row.median('comm_ms'):.0f}" if row.mode != "none" else "",
                    f"{over:.3f}" if over and row.mode != "none" else "",
                ])
    page.text(tables.table(
        ["Gbit/s", "model", "ddp_tuned chose", "ms", "best of a sweep", "ms", "difference", "at most 3%"],
        tuning,
    ))
    page.text(tables.table(
        ["Gbit/s", "model", "mode", "step ms", "/ none", "comm ms", "/ wire alone"], steps
    ))


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1])
    results, output, plan = map(pathlib.Path, sys.argv[1:])
    if not results.is_dir():
        sys.exit(f"growth.py: expected a folder of results, got {results}")
    page = Page(output)
    page.text(FOREWORD)
    page.text(read(results / "machine.txt"))
    for add in (add_collectives, add_parameters, add_ranks, add_setup, add_links):
        add(page, results)
    if plan.is_file():
        growth_plan.add(page, results, plan)
    else:
        print(f"growth.py: {plan} is not built, so the page has no predicted steps", file=sys.stderr)
    page.write("GROWTH.md")


if __name__ == "__main__":
    main()
