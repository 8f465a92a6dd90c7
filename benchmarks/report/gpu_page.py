"""Makes the tables of docs/gpus.md from what scripts/gpu_check.sh left of a run on a GPU.

usage: gpu_page.py FOLDER                  prints the tables
       gpu_page.py FOLDER --page FILE      writes them into the page, between the lines
                                           "<!-- gpu_page: begin -->" and "<!-- gpu_page: end -->"
       gpu_page.py FOLDER --page FILE --check

FOLDER is one of benchmarks/gpu: <GPU>-<date>, with steps/*.jsonl, census.jsonl, memory.jsonl, times.jsonl and
fsdp.jsonl, as far as the run came.

Exit code: 0; 1 when the page has no such lines, or, with --check, other tables.
"""

import argparse
import json
import pathlib
import sys

import gpu_report
import tables

BEGIN, END = "<!-- gpu_page: begin -->", "<!-- gpu_page: end -->"
# Calls of which a step's numbers stand in the page: the field, and the column.
CALLS = {
    "launches": "launches", "copies": "copies", "event_records": "events", "stream_waits": "stream waits",
    "synchronizations": "host waits",
}
MIB = 2**20


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_name(lines):
    """{(ranks, name): {language: line}}, in the order of the lines; of lines of one name the last."""
    found = {}
    for line in lines:
        found.setdefault((line["ranks"], line["name"]), {})[line["by"]] = line
    return found


def number(value):
    return f"{value:.1f}".removesuffix(".0")


def pair(ours, peer, field):
    """Such as "12 / 40": this library's and Python's; a number that is not there is a dash."""
    return " / ".join(number(line[field]) if line and field in line else "-" for line in (ours, peer))


def step_table(folder):
    """A row for each model, with what the wrappers take of a step without them."""
    if not any((folder / "steps").glob("*.jsonl")):
        return ""
    lines = gpu_report.read(folder / "steps")
    rows = []
    for model in tables.models_of(lines):
        by_mode = {row.mode: row for row in tables.rows_of(lines, model)}
        cells = [ratio_cell(by_mode.get(mode)) for mode in ("ddp", "ddp_hook", "py_ddp", "py_ddp_hook")]
        none = by_mode.get("none")
        rows.append([model, f"{none.median('compute_ms'):.1f}" if none else "-", *cells])
    columns = ["model", "none, ms", "wrapper", "with a hook", "Python's wrapper", "with a hook"]
    return tables.table(columns, rows)


def ratio_cell(row):
    if row is None:
        return "-"
    ratio, interval = row.over_none()
    return f"{ratio:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def census_table(folder):
    rows = []
    for (ranks, name), lines in by_name(read_lines(folder / "census.jsonl")).items():
        ours, peer = lines.get("C++"), lines.get("Python")
        ahead = "-" if ours is None else "yes" if ours["ran_ahead"] else "no"
        rows.append([str(ranks), name, *(pair(ours, peer, field) for field in CALLS), ahead])
    if not rows:
        return ""
    return tables.table(["ranks", "step", *CALLS.values(), "the host ran ahead"], rows)


def memory_table(folder):
    rows = []
    for (ranks, name), lines in by_name(read_lines(folder / "memory.jsonl")).items():
        line = lines["C++"]
        peak, expected = line["peak_bytes"] / MIB, line["expected_bytes"] / MIB
        rows.append([
            str(ranks), name, f"{peak:.0f}", f"{expected:.0f}", f"{peak / expected:.2f}", f"{line['rest_bytes'] / MIB:.0f}",
        ])
    if not rows:
        return ""
    return tables.table(["ranks", "model", "peak, MiB", "by the pages", "ratio", "between steps"], rows)


def time_table(folder):
    rows = []
    for (_, name), lines in by_name(read_lines(folder / "times.jsonl")).items():
        rows.append([name, *(f"{lines[by]['ms']:.3f}" if by in lines else "-" for by in ("C++", "Python"))])
    for line in read_lines(folder / "fsdp.jsonl"):
        by = ["-", f"{line['step_ms']:.3f}"] if line["mode"].startswith("py_") else [f"{line['step_ms']:.3f}", "-"]
        rows.append([f"step of eight layers, {line['mode']}", *by])
    return tables.table(["call", "ms", "Python's, ms"], rows) if rows else ""


def page_of(folder):
    """The text between the lines of the page."""
    folder = pathlib.Path(folder)
    parts = [
        f"Made by `benchmarks/report/gpu_page.py` from `benchmarks/gpu/{folder.name}`.",
        ("A step, one rank, over a step without a wrapper. With a hook one rank packs and sends, too:", step_table(folder)),
        ("CUDA calls of a step, this library's / Python's:", census_table(folder)),
        ("Memory of tensors, beside the formulas of the pages:", memory_table(folder)),
        ("Times of calls:", time_table(folder)),
    ]
    texts = [part if isinstance(part, str) else "\n\n".join(part) for part in parts if part[1]]
    return "\n\n".join(texts)


def with_tables(page, text):
    """The page with that text between its lines; None where it lacks them."""
    before, begin, rest = page.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    return f"{before}{begin}{text}\n{end}{after}" if begin and end else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = page_of(options.folder)
    if options.page is None:
        print(text)
        return 0
    old = options.page.read_text()
    new = with_tables(old, text)
    if new is None:
        print(f"gpu_page: expected lines '{BEGIN}' and '{END}' in {options.page}, found none", file=sys.stderr)
        return 1
    if options.check:
        if new != old:
            print(f"gpu_page: {options.page} has other tables than {options.folder}: run it without --check", file=sys.stderr)
        return int(new != old)
    options.page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
