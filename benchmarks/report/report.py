"""Writes RESULTS.md and its pictures from the measurements of scripts/bench.sh and bench_link.sh.

usage: report.py RESULTS_FOLDER OUTPUT_FOLDER

RESULTS_FOLDER holds steps/*.jsonl, sweep/*.jsonl, loopback/*.jsonl, link_<rate>/*.jsonl,
memory/*.jsonl and overhead/*.txt (a file for each process, in memory/ for the processes of a pass),
timeline/<model>.json, machine.txt and link_<rate>/rate.txt; missing parts are left out.
"""

import json
import pathlib
import sys

import svg
import tables

FOREWORD = """# Results

Of `scripts/bench.sh`{link}; [README.md](README.md) says how each column is made, and in which runs what
stands here was measured. Times depend on the machine and on what else it does: judge the ratios. Each
is of one process, whose modes take turns; processes of C++ and Python took turns as well, in both
orders. [GROWTH.md](GROWTH.md) has how costs grow with bytes, parameters, ranks and slower links.
"""

OVERHEAD = """## The reducer alone

What it adds to a step of forward and backward: one rank, 800 small parameters, nothing to send. What
it may add at most is a share of what c10d's adds in the same process."""

MEMORY = """## Peak memory

Of a rank, while one mode makes the model, wraps it and trains, alone in its processes: private and
shared memory, without the pages of programs and libraries. The ranks share what they all have mapped
in equal parts. "/ gradients" is what comes above `none`, in bytes of the gradients."""

LOOPBACK = """## Over Gloo on one host

The sweep again with `--backend gloo`, which is over the loopback device."""


def read(path):
    return path.read_text().strip() if path.exists() else ""


def step_sections(lines, level="##"):
    parts = []
    for model in tables.models_of(lines):
        parts.append(f"{level} {model}\n\n" + tables.step_table(tables.rows_of(lines, model)))
        agreement = tables.agreement(lines, model)
        if agreement:
            parts.append(agreement)
    return parts


def sweep_chart(lines, model):
    rows = tables.rows_of(lines, model)
    caps = sorted({row.cap for row in rows if row.cap is not None})
    modes = list(dict.fromkeys(row.mode for row in rows if row.cap is not None))

    def ratio(mode, cap):
        return next((row.ratio() for row in rows if row.mode == mode and row.cap == cap), None)

    series = [(mode, [ratio(mode, cap) for cap in caps]) for mode in modes]
    return svg.line_chart(
        f"{model}: a step against the size of buckets",
        [f"{cap:g}" for cap in caps],
        series,
        "bucket_cap_mb, MiB",
        "step / none of the same process",
    )


def timeline_chart(record):
    rows = []
    for rank, spans in enumerate(record["ranks"]):
        for track, color in (("compute", 0), ("communication", 1)):
            of_track = [s for s in spans if s["track"] == track]
            drawn = [
                (s["name"], s["start_ms"], s["end_ms"], color + 2 * (index % 2))
                for index, s in enumerate(of_track)
            ]
            if drawn:
                rows.append((f"rank {rank}, {track}", drawn))
    title = f"{record['model']}: one step of {record['mode']} on {record['world']} ranks"
    return svg.timeline(title, rows)


class Report:
    def __init__(self, results, output):
        self.results = results
        self.output = output
        self.parts = []

    def picture(self, name, drawing, alternative):
        (self.output / "plots").mkdir(parents=True, exist_ok=True)
        (self.output / "plots" / name).write_text(drawing)
        self.parts.append(f"![{alternative}](plots/{name})")

    def add_steps(self):
        lines = tables.read_lines(self.results / "steps")
        targets = {model: ("compute_ms", most) for model, most in tables.TARGETS.items()}
        table = tables.target_table(lines, targets)
        if table:
            self.parts.append("## Targets\n\n" + table)
        self.parts += step_sections(lines)

    def add_overhead(self):
        table = tables.overhead_table(self.results / "overhead")
        if table:
            self.parts += [OVERHEAD, table]

    def add_memory(self):
        lines = tables.read_lines(self.results / "memory")
        if lines:
            self.parts.append(MEMORY)
        for model in tables.models_of(lines):
            gradients = next(r["bytes"] for r in lines if r["model"] == model)
            self.parts.append(f"### {model}, {tables.megabytes(gradients)} MB of gradients")
            self.parts.append(tables.memory_table(lines, model))

    def add_sweeps(self):
        swept = tables.read_lines(self.results / "sweep")
        tuned = tables.tuning_table(tables.read_lines(self.results / "steps") + swept)
        if swept or tuned:
            self.parts.append("## Bucket sizes")
        for model in tables.models_of(swept):
            chart = sweep_chart(swept, model)
            self.picture(f"sweep_{model}.svg", chart, f"steps of {model} over none, by bucket size")
        self.parts.append(tuned)

    def add_loopback(self):
        lines = tables.read_lines(self.results / "loopback")
        if lines:
            self.parts += [LOOPBACK, tables.tuning_table(lines)]
            self.parts += step_sections(lines, level="###")

    def add_timelines(self):
        for index, path in enumerate(sorted((self.results / "timeline").glob("*.json"))):
            if index == 0:
                self.parts.append("## One step")
            record = json.loads(path.read_text())
            name = f"timeline_{record['model']}.svg"
            self.picture(name, timeline_chart(record), f"one step of {record['model']}")

    def add_links(self):
        def gigabits(path):
            return float(path.name.removeprefix("link_"))

        for folder in sorted(self.results.glob("link_*"), key=gigabits):
            lines = tables.read_lines(folder)
            rate = gigabits(folder)
            title = f"## One rank a host, over a link of {rate:g} Gbit/s"
            self.parts.append(f"{title}\n\n{read(folder / 'rate.txt')}".strip())
            if rate == 1:
                self.parts.append(tables.target_table(lines, tables.LINK_TARGETS))
            self.parts.append(tables.tuning_table(lines))
            self.parts += step_sections(lines, level="###")

    def write(self):
        has_link = any(self.results.glob("link_*"))
        foreword = FOREWORD.format(link=" and `scripts/bench_link.sh`" if has_link else "")
        self.parts = [foreword.strip(), read(self.results / "machine.txt")]
        self.add_steps()
        self.add_overhead()
        self.add_memory()
        self.add_sweeps()
        self.add_loopback()
        self.add_timelines()
        self.add_links()
        text = "\n\n".join(part for part in self.parts if part) + "\n"
        (self.output / "RESULTS.md").write_text(text)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1])
    results, output = map(pathlib.Path, sys.argv[1:])
    if not results.is_dir():
        sys.exit(f"report.py: expected a folder of results, got {results}")
    Report(results, output).write()


if __name__ == "__main__":
    main()
