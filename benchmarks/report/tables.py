"""Reads the lines of ddp_bench and ddp_peer.py, and makes tables of them."""

import json
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
from peer_statistics import FEWEST_FOR_INTERVAL, median_interval

# Limits of mode ddp: step_ms over compute_ms, two ranks on one host.
TARGETS = {
    "mnist": 1.02, "mlp": 1.10, "small_params": 1.02, "resnet18": 1.02, "transformer": 1.02,
}
# Limits on a link of 1 Gbit/s: the field to divide by, and the limit.
LINK_TARGETS = {"resnet18": ("compute_ms", 1.12), "mlp": ("alone_ms", 1.05)}
# Limit of ddp_tuned's step, over that of the best bucket size of a sweep.
TUNED_TARGET = 1.03
FEWEST_SIZES = 3  # of a sweep whose best size is used as a reference
# Limits of the time that engines of `costs reducer` add to a step, as shares of c10d's.
OVERHEAD_TARGETS = {"ddp": 0.08, "ddp, unused": 0.15}
# Limit of the memory of modes above `none`, as a multiple of the gradients' bytes.
MEMORY_TARGET = 1.1
MEMORY_TARGET_MODES = ("ddp", "ddp_view")
TUNED = "ddp_tuned"
MODE_ORDER = [
    "none", "naive", "flat", "c10d", "ddp", "ddp_view", "ddp_unused", "ddp_static", "ddp_hook",
    "ddp_step", "ddp_tuned",
    "py_ddp", "py_ddp_view", "py_ddp_unused", "py_ddp_static", "py_ddp_hook",
]
# Largest relative difference of checksums: sums over millions of parameters, each rounded in another
# order.
SAME = 1e-6


def read_lines(folder):
    """All lines of a folder's files; a file is the output of one process.

    Sets alone_ms, the time of communication alone in that process: one all-reduce of all gradients,
    as mode flat sends; None where flat did not run.
    """
    lines = []
    for path in sorted(pathlib.Path(folder).glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        by = "Python" if path.stem.endswith("-py") else "C++"
        alone = next((r["comm_ms"] for r in records if r["mode"] == "flat"), None)
        for record in records:
            record.update(process=str(path), by=by, alone_ms=alone)
        lines += records
    return lines


def told_cap(record):
    """The bucket size given to a mode; None for ddp_tuned, whose choice differs between runs."""
    return None if record["mode"] == TUNED else record.get("bucket_cap_mb")


class Row:
    """One mode of one model, over all processes that ran it."""

    def __init__(self, records):
        first = records[0]
        self.mode, self.cap, self.by = first["mode"], told_cap(first), first["by"]
        self.records = records

    def median(self, field):
        return statistics.median(record[field] for record in self.records)

    def over_none(self, field="ratio"):
        """The ratio to mode `none` over the rounds of all processes: a median and its interval, or None.

        The field is "ratio" or "cpu_ratio".
        """
        ratios = [ratio for record in self.records for ratio in record[f"{field}_of_rounds"]]
        return statistics.median(ratios), median_interval(ratios)

    def ratio(self):
        return self.over_none()[0]

    def over_alone(self):
        """The ratio of the step to communication alone in one process; None where none has both."""
        ratios = [r["step_ms"] / r["alone_ms"] for r in self.records if r["alone_ms"]]
        return statistics.median(ratios) if ratios else None

    def caps(self):
        """The given or chosen caps: "25 MiB", "5 or 10 MiB"; "" where no process names one."""
        caps = {record.get("bucket_cap_mb") for record in self.records} - {None}
        return " or ".join(f"{cap:g}" for cap in sorted(caps)) + " MiB" if caps else ""

    def name(self):
        name = f"{self.mode}, Python" if self.mode == "none" and self.by == "Python" else self.mode
        return ", ".join(filter(None, [name, self.caps()]))


def rows_of(lines, model):
    groups = {}
    for record in lines:
        if record["model"] == model:
            key = record["by"], record["mode"], told_cap(record)
            groups.setdefault(key, []).append(record)
    rows = [Row(records) for records in groups.values()]
    return sorted(rows, key=lambda row: (row.by, MODE_ORDER.index(row.mode), row.cap or 0))


def models_of(lines):
    """The models of the lines, in the order in which they first appear."""
    return list(dict.fromkeys(record["model"] for record in lines))


def span(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    dash = " to " if low.startswith("-") else "-"
    return low if low == high else f"{low}{dash}{high}"


def table(columns, rows):
    """A table in Markdown; "" without rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def interval_cell(interval):
    return span(interval, "{:.3f}") if interval else f"needs {FEWEST_FOR_INTERVAL} rounds"


def step_table(rows):
    def cells(row):
        over_none, cpu_over_none = row.over_none("ratio"), row.over_none("cpu_ratio")
        timed = [
            row.name(),
            f"{row.median('step_ms'):.1f}",
            f"{row.median('step_ms_p10'):.1f}-{row.median('step_ms_p90'):.1f}",
        ]
        cpu = f"{row.median('cpu_ms'):.1f}"
        if row.mode == "none":
            return timed + ["", "", "", cpu] + [""] * 5
        timed += [
            f"{over_none[0]:.3f}",
            interval_cell(over_none[1]),
            span([record["ratio"] for record in row.records], "{:.3f}"),
            cpu,
            f"{cpu_over_none[0]:.3f}",
            interval_cell(cpu_over_none[1]),
        ]
        over_alone = row.over_alone()
        return timed + [
            f"{row.median('comm_ms'):.1f}",
            f"{over_alone:.3f}" if over_alone else "-",
            f"{row.median('overlap'):.2f}",
        ]

    columns = [
        "mode", "step ms", "p10-p90", "/ none", "95%", "of each process", "CPU ms", "CPU / none",
        "95%", "comm ms", "/ comm", "overlap",
    ]
    return table(columns, [cells(row) for row in rows])


def verdict(value, target):
    if value <= target:
        return "met"
    return f"missed by {100 * (value / target - 1):.1f}%"


def target_table(lines, targets):
    """Compares mode ddp, with its own bucket sizes, with its limits."""
    rows = []
    for model, (field, target) in targets.items():
        row = next(
            (r for r in rows_of(lines, model) if r.mode == "ddp" and r.cap is None), None
        )
        if row is None:
            continue
        if field == "compute_ms":
            (value, interval), over = row.over_none(), "none"
            shown = interval_cell(interval)
        else:
            value, over, shown = row.over_alone(), "communication alone", ""
        reached = [f"{value:.3f} x {over}", verdict(value, target)] if value else ["-", ""]
        rows.append([model, reached[0], shown, f"{target}", reached[1]])
    return table(["model", "ddp", "95%", "at most", ""], rows)


def tuning_table(lines):
    """The choice and the time of ddp_tuned, beside the best of the bucket sizes given to ddp."""
    rows = []
    for model in models_of(lines):
        tuned = [r for r in lines if r["model"] == model and r["mode"] == TUNED]
        if not tuned:
            continue
        swept = [r for r in rows_of(lines, model) if r.mode == "ddp" and r.cap is not None]
        # Where ddp_tuned ran in processes of the sweep, only those count: there both took turns.
        processes = {record["process"] for row in swept for record in row.records}
        tuned = Row([r for r in tuned if r["process"] in processes] or tuned)
        of_sweep = ["-", "-", "-", ""]
        if swept:
            best = min(swept, key=Row.ratio)
            apart = tuned.ratio() / best.ratio()
            of_sweep = [
                best.caps(),
                f"{best.ratio():.3f}",
                f"{100 * (apart - 1):+.1f}%",
                verdict(apart, TUNED_TARGET) if len(swept) >= FEWEST_SIZES else "",
            ]
        rows.append([model, tuned.caps(), f"{tuned.ratio():.3f}", *of_sweep])
    columns = [
        "model", "ddp_tuned chose", "/ none", "best of a sweep", "/ none", "difference",
        f"at most {100 * (TUNED_TARGET - 1):.0f}%",
    ]
    return table(columns, rows)


def megabytes(count):
    return f"{count / 1e6:.1f}"


def memory_table(lines, model):
    """Peaks beside those of mode `none` of the same language, medians over processes."""
    rows = rows_of(lines, model)
    base = {row.by: row.median("peak_bytes") for row in rows if row.mode == "none"}

    def cells(row):
        peak = row.median("peak_bytes")
        measured = [
            row.name(),
            megabytes(peak),
            span([record["peak_bytes"] / 1e6 for record in row.records], "{:.1f}"),
            megabytes(row.median("anonymous_bytes")),
            megabytes(row.median("shared_bytes")),
        ]
        if row.mode == "none" or row.by not in base:
            return measured + [""] * 4
        above = peak - base[row.by]
        share = above / row.median("bytes")
        measured += [megabytes(above), f"{share:.2f}"]
        if row.mode not in MEMORY_TARGET_MODES:
            return measured + ["", ""]
        most = base[row.by] + MEMORY_TARGET * row.median("bytes")
        return measured + [megabytes(most), verdict(peak, most)]

    columns = [
        "mode", "peak MB", "of each process", "private", "shared", "above none", "/ gradients",
        "at most", "",
    ]
    return table(columns, [cells(row) for row in rows])


def overhead_table(folder):
    """A table of the output of `costs reducer`, a file for each process."""
    steps, above = {}, {}  # by engine, in ms, a value for each process
    for path in sorted(pathlib.Path(folder).glob("*.txt")):
        for line in path.read_text().splitlines()[1:]:
            name, step, added, _ = line.rsplit(maxsplit=3)
            steps.setdefault(name, []).append(float(step))
            above.setdefault(name, []).append(float(added))

    def cells(name):
        timed = [name, f"{statistics.median(steps[name]):.2f}"]
        if name == "none":
            return timed + [""] * 5
        added = [f"{statistics.median(above[name]):.3f}", span(above[name], "{:.3f}")]
        peer = "c10d, unused" if name.endswith("unused") else "c10d"
        if name == peer:
            return timed + added + [""] * 3
        share = statistics.median(own / its for own, its in zip(above[name], above[peer]))
        target = OVERHEAD_TARGETS.get(name)
        judged = [f"{target:.2f}", verdict(share, target)] if target else ["", ""]
        return timed + added + [f"{share:.3f}", *judged]

    columns = ["engine", "step ms", "ms above none", "of each process", "/ c10d", "at most", ""]
    return table(columns, [cells(name) for name in steps])


def agreement(lines, model):
    """Compares the checksums of C++ and Python processes; both must have run as many steps."""
    sums = {}
    for record in lines:
        if record["model"] == model and record["bytes"] > 0:
            sums.setdefault(record["by"], set()).add(record["checksum"])
    if len(sums) < 2:
        return ""
    everything = set.union(*sums.values())
    if None in everything:
        return "A training diverged: there is a checksum that is not a number."
    if len(everything) == 1:
        return "All modes and processes ended with the same checksum, to the last digit."
    apart = (max(everything) - min(everything)) / max(everything)
    judgement = "but for rounding" if apart < SAME else "WHICH IS MORE THAN ROUNDING"
    return f"Checksums of C++ and Python agree to {apart:.1g} of their size, {judgement}."
