"""Lines of ddp_bench and ddp_peer.py, and the tables made of them."""

import json
import pathlib
import statistics

# What mode ddp shall come to at most (issue 6): step_ms over compute_ms, two ranks on one host.
TARGETS = {"mnist": 1.05, "mlp": 1.25, "small_params": 1.03, "resnet18": 1.04}
# On a link of 1 Gbit/s: over which field, and at most.
LINK_TARGETS = {"resnet18": ("compute_ms", 1.12), "mlp": ("comm_ms", 1.05)}
MODE_ORDER = [
    "none", "naive", "flat", "c10d", "ddp", "ddp_view", "ddp_unused", "ddp_static",
    "ddp_step", "ddp_tuned",
    "py_ddp", "py_ddp_view", "py_ddp_unused", "py_ddp_static",
]
# Sums over millions of parameters, of which each was rounded in another order.
SAME = 1e-6


def read_lines(folder):
    """All lines of a folder's files; a file is what one process printed."""
    lines = []
    for path in sorted(pathlib.Path(folder).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            record["process"] = path.stem
            record["by"] = "Python" if path.stem.endswith("-py") else "C++"
            lines.append(record)
    return lines


class Row:
    """One mode of one model, over all processes that ran it."""

    def __init__(self, records):
        first = records[0]
        self.mode, self.cap, self.by = first["mode"], first["bucket_cap_mb"], first["by"]
        self.records = records

    def median(self, field):
        return statistics.median(record[field] for record in self.records)

    def ratios(self, field="compute_ms"):
        """Of the step to that field of the same process; only these can be compared."""
        return [r["step_ms"] / r[field] for r in self.records if r[field] > 0]

    def ratio(self, field="compute_ms"):
        ratios = self.ratios(field)
        return statistics.median(ratios) if ratios else None

    def name(self):
        name = f"{self.mode}, Python" if self.mode == "none" and self.by == "Python" else self.mode
        return name if self.cap is None else f"{name}, {self.cap:g} MiB"


def rows_of(lines, model):
    groups = {}
    for record in lines:
        if record["model"] == model:
            key = record["by"], record["mode"], record["bucket_cap_mb"]
            groups.setdefault(key, []).append(record)
    rows = [Row(records) for records in groups.values()]
    return sorted(rows, key=lambda row: (row.by, MODE_ORDER.index(row.mode), row.cap or 0))


def models_of(lines):
    """In the order in which they first appear."""
    return list(dict.fromkeys(record["model"] for record in lines))


def span(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"


def step_table(rows):
    text = [
        "| mode | step ms | p10-p90 | / none | of each process | comm ms | / comm | overlap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        communicates = row.median("bytes") > 0
        over_comm = row.ratio("comm_ms")
        cells = [
            row.name(),
            f"{row.median('step_ms'):.1f}",
            f"{row.median('step_ms_p10'):.1f}-{row.median('step_ms_p90'):.1f}",
            f"{row.ratio():.3f}",
            span(row.ratios(), "{:.3f}"),
            f"{row.median('comm_ms'):.1f}" if communicates else "",
            f"{over_comm:.3f}" if communicates and over_comm else "",
            f"{row.median('overlap'):.2f}" if communicates else "",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def verdict(value, target):
    if value <= target:
        return "met"
    return f"missed by {100 * (value / target - 1):.1f}%"


def target_table(lines, targets):
    """How mode ddp, with its own bucket sizes, does against what it shall come to at most."""
    text = ["| model | ddp | at most | |", "|---|---|---|---|"]
    for model, (field, target) in targets.items():
        row = next(
            (r for r in rows_of(lines, model) if r.mode == "ddp" and r.cap is None), None
        )
        if row is None:
            continue
        over = {"compute_ms": "none", "comm_ms": "communication alone"}[field]
        value = row.ratio(field)
        text.append(f"| {model} | {value:.3f} x {over} | {target} | {verdict(value, target)} |")
    return "\n".join(text) if len(text) > 2 else ""


def agreement(lines, model):
    """What the checksums of C++ and Python processes say; their steps must be as many."""
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
