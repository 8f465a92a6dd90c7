#!/usr/bin/env python3
"""Draws one step of a trace that ddp::write_trace wrote, for two ranks, as an SVG.

usage: timeline_svg.py TRACE.json OUT.svg [--step N] [--title TEXT] [--ranks R R]

For each rank: forward, backward, the wait for the last buckets, and what the program does until its next forward
pass, which is the optimizer's step; below, the all-reduce of each bucket. A trace has the first ten steps and then
every hundredth; without --step, the script takes the shortest one whose next step the trace has, too.
"""

import argparse
import json
import pathlib
import re
import sys
from xml.sax.saxutils import escape

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks/report"))

from svg import number, ticks  # noqa: E402

# Each can be read on white and on the dark page of a forge; the test computes it.
INK = "#6e7781"
KINDS = {
    "forward": ("#2f7ed8", "forward"),
    "backward": ("#8250df", "backward"),
    "wait": ("#c2410c", "wait for the last buckets"),
    "step": ("#9a6700", "optimizer's step, next batch"),
    "bucket": ("#1a7f37", "all-reduce of a bucket"),
}
WIDTH, LEFT, RIGHT, TOP, ROW, GAP = 860, 190, 16, 62, 20, 10


class Rank:
    """A rank's part of one step: rows of (name, [(kind, begin, end)]), in microseconds."""

    def __init__(self, spans, step):
        named = {span["name"]: span for span in spans}
        self.begin = named[f"forward {step}"]["ts"]
        self.end = named[f"forward {step + 1}"]["ts"]
        wait = named[f"wait for buckets {step}"]
        main = [
            ("forward", *ends_of(named[f"forward {step}"])),
            ("backward", *ends_of(named[f"backward {step}"])),
            ("wait", *ends_of(wait)),
            ("step", ends_of(wait)[1], self.end),
        ]
        buckets = sorted(
            (span for span in spans if span["name"].startswith("bucket ") and self.has(span)),
            key=lambda span: int(span["name"].split()[1]),
        )
        self.rows = [("computation", main)] + [
            (f"{span['name']}, {size_of(span['args']['bytes'])}", [("bucket", *ends_of(span))])
            for span in buckets
        ]

    def has(self, span):
        return self.begin <= span["ts"] < self.end


def ends_of(span):
    return span["ts"], span["ts"] + span["dur"]


def size_of(size):
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"


def spans_by_rank(trace):
    by_rank = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_rank.setdefault(event["pid"], []).append(event)
    return by_rank


def complete_steps(spans):
    """The steps after which the trace has the next one, too."""
    forward = (re.fullmatch(r"forward (\d+)", span["name"]) for span in spans)
    have = {int(match[1]) for match in forward if match}
    return {step for step in have if step + 1 in have}


def ranks_of_step(trace, ranks=(0, 1), step=None):
    """Returns the step's number, and its part of each of these ranks.

    Without a number: the step that takes the least, from the first of the ranks to begin to the last to end.
    """
    by_rank = spans_by_rank(trace)
    missing = [str(rank) for rank in ranks if rank not in by_rank]
    if missing:
        raise ValueError(f"trace: expected spans of rank {' and '.join(missing)}, got none")
    steps = set.intersection(*(complete_steps(by_rank[rank]) for rank in ranks))
    if step is None:
        candidates = {s: [Rank(by_rank[r], s) for r in ranks] for s in steps}
        if not candidates:
            raise ValueError("trace: expected two steps after each other on these ranks, got none")
        step = min(candidates, key=lambda s: (length_of(candidates[s]), s))
    elif step not in steps:
        raise ValueError(f"--step: expected one of {sorted(steps)}, got {step}")
    return step, [Rank(by_rank[rank], step) for rank in ranks]


def length_of(parts):
    return max(part.end for part in parts) - min(part.begin for part in parts)


def words(x, y, text, anchor="start", extra=""):
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def bar(x, y, wide, high, kind):
    color = KINDS[kind][0]
    place = f'x="{number(x)}" y="{number(y)}" width="{number(wide)}" height="{number(high)}"'
    return f'<rect class="{kind}" {place} fill="{color}"/>'


def legend():
    x = 16
    for kind, (_, name) in KINDS.items():
        yield bar(x, 33, 12, 12, kind)
        yield words(x + 17, 43, name)
        x += 30 + 6.6 * len(name)


def axis(x_of, length, floor):
    for tick in ticks(0, length / 1000, 10):
        x = x_of(tick * 1000)
        yield f'<line x1="{number(x)}" y1="{TOP}" x2="{number(x)}" y2="{number(floor)}"/>'
        yield words(x, floor + 15, f"{tick:g}", "middle")
    yield words(WIDTH - RIGHT, floor + 32, "ms since the step began", "end")


def picture(title, ranks, parts):
    """The SVG. `parts` has what ranks_of_step() returned of each of `ranks`."""
    begin, length = min(part.begin for part in parts), length_of(parts)

    def x_of(since):
        return LEFT + (WIDTH - LEFT - RIGHT) * since / length

    bars, y = [], TOP + GAP / 2
    for rank, part in zip(ranks, parts):
        bars.append(words(16, y + 14, f"rank {rank}", extra=' font-weight="bold"'))
        for name, spans in part.rows:
            bars.append(words(LEFT - 8, y + 14, name, "end"))
            for kind, start, end in spans:
                wide = max(x_of(end - begin) - x_of(start - begin), 1)
                bars.append(bar(x_of(start - begin), y + 2, wide, ROW - 4, kind))
            y += ROW
        y += GAP
    floor = y - GAP / 2
    lines = [words(16, 20, title, extra=' font-weight="bold"'), *legend(), *axis(x_of, length, floor), *bars]
    high = f"{floor + 40:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}"\n'
        f'     font-family="sans-serif" font-size="12" fill="{INK}" stroke="none">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>line {{ stroke: {INK}; stroke-opacity: 0.3; }}</style>\n" + "\n".join(lines) + "\n</svg>\n"
    )


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--title", default="One step on two ranks")
    parser.add_argument("--ranks", type=int, nargs=2, default=(0, 1))
    options = parser.parse_args(arguments)
    try:
        step, parts = ranks_of_step(json.loads(options.trace.read_text()), options.ranks, options.step)
    except (OSError, ValueError) as error:
        sys.exit(f"timeline_svg: {error}")
    options.out.write_text(picture(options.title, options.ranks, parts))
    print(f"step {step}, {length_of(parts) / 1000:.1f} ms: {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
