"""Checks scripts/timeline_svg.py on traces of known times, and the picture in docs.

usage: timeline_svg_test.py <the repository>
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "scripts"))

import timeline_svg

NEXT_STEP = 60_000  # microseconds, of step 1; step 2 takes half as long


def span(name, rank, begin, duration, size=0):
    return {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": begin, "dur": duration, "args": {"bytes": size}}


def steps_of(rank, late=0):
    """Two whole steps of a rank and the forward pass of a third, which begin `late` microseconds late."""
    events = [{"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
    begin = 1e12 + late
    for step, unit in ((1, 1000), (2, 500)):
        events += [
            span(f"forward {step}", rank, begin, 20 * unit),
            span(f"backward {step}", rank, begin + 20 * unit, 30 * unit),
            span(f"wait for buckets {step}", rank, begin + 50 * unit, 4 * unit, 300_000),
            span("bucket 1", rank, begin + 45 * unit, 9 * unit, 50_000),
            span("bucket 0", rank, begin + 30 * unit, 10 * unit, 250_000),
        ]
        begin += 60 * unit
    return events + [span("forward 3", rank, begin, 10_000)]


TRACE = {"traceEvents": steps_of(0) + steps_of(1, late=2000)}


def drawing(svg_text):
    return xml.etree.ElementTree.fromstring(svg_text)


def bars_of(svg_text, kind):
    """(left, right) of each bar of a kind but that of the legend."""
    found = [e for e in drawing(svg_text).iter("{http://www.w3.org/2000/svg}rect") if e.get("class") == kind]
    return [(float(e.get("x")), float(e.get("x")) + float(e.get("width"))) for e in found[1:]]


def luminance(color):
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class Steps(unittest.TestCase):
    def test_the_shortest_whole_step_is_taken(self):
        step, parts = timeline_svg.ranks_of_step(TRACE)
        self.assertEqual(step, 2)
        self.assertEqual([part.end - part.begin for part in parts], [NEXT_STEP / 2] * 2)

    def test_a_step_that_is_asked_for(self):
        step, parts = timeline_svg.ranks_of_step(TRACE, step=1)
        self.assertEqual(step, 1)
        self.assertEqual(parts[0].end - parts[0].begin, NEXT_STEP)

    def test_the_last_step_has_no_end(self):
        with self.assertRaisesRegex(ValueError, r"--step: expected one of \[1, 2\], got 3"):
            timeline_svg.ranks_of_step(TRACE, step=3)

    def test_a_rank_that_is_not_there(self):
        with self.assertRaisesRegex(ValueError, "expected spans of rank 2 and 5, got none"):
            timeline_svg.ranks_of_step(TRACE, ranks=(2, 5))

    def test_no_step_with_a_next_one(self):
        trace = {"traceEvents": [e for e in TRACE["traceEvents"] if e["name"] != "forward 2"]}
        with self.assertRaisesRegex(ValueError, "expected two steps after each other"):
            timeline_svg.ranks_of_step(trace)

    def test_rows(self):
        _, (part, _) = timeline_svg.ranks_of_step(TRACE, step=1)
        self.assertEqual(
            [name for name, _ in part.rows], ["computation", "bucket 0, 0.2 MB", "bucket 1, 50 kB"])
        since = [(kind, begin - part.begin, end - part.begin) for _, row in part.rows for kind, begin, end in row]
        self.assertEqual(
            since,
            [
                ("forward", 0, 20_000), ("backward", 20_000, 50_000), ("wait", 50_000, 54_000),
                ("step", 54_000, 60_000), ("bucket", 30_000, 40_000), ("bucket", 45_000, 54_000),
            ],
        )  # fmt: skip


class Picture(unittest.TestCase):
    def setUp(self):
        self.svg = timeline_svg.picture("a < b", (0, 1), timeline_svg.ranks_of_step(TRACE, step=1)[1])

    def test_bars_lie_under_each_other_by_time(self):
        (forward, late), (backward, _) = bars_of(self.svg, "forward"), bars_of(self.svg, "backward")
        self.assertEqual(forward[0], timeline_svg.LEFT)
        self.assertEqual(forward[1], backward[0])
        self.assertGreater(late[0], forward[0])
        first, second = bars_of(self.svg, "bucket")[:2]
        self.assertTrue(backward[0] < first[0] < first[1] < backward[1] < second[1])
        self.assertEqual(bars_of(self.svg, "step")[1][1], timeline_svg.WIDTH - timeline_svg.RIGHT)

    def test_words(self):
        words = [e.text for e in drawing(self.svg).iter("{http://www.w3.org/2000/svg}text")]
        for expected in ("a < b", "rank 0", "rank 1", "forward", "backward", "bucket 0, 0.2 MB", "60"):
            self.assertIn(expected, words)

    def test_light_and_dark(self):
        colors = [timeline_svg.INK, *(color for color, _ in timeline_svg.KINDS.values())]
        for color in colors:
            for page in ("#ffffff", "#0d1117"):
                self.assertGreater(contrast(color, page), 3.5, f"{color} on {page}")


class Program(unittest.TestCase):
    def run_on(self, text):
        with tempfile.TemporaryDirectory() as folder:
            trace, out = pathlib.Path(folder, "trace.json"), pathlib.Path(folder, "out.svg")
            trace.write_text(text)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                timeline_svg.main([str(trace), str(out), "--title", "T"])
            return said.getvalue(), out.read_text()

    def test_writes_the_picture(self):
        said, svg = self.run_on(json.dumps(TRACE))
        self.assertIn("step 2, 32.0 ms", said)
        self.assertEqual(drawing(svg)[0].text, "T")

    def test_what_is_no_trace(self):
        with self.assertRaisesRegex(SystemExit, "timeline_svg: "):
            self.run_on("{")

    def test_the_picture_in_docs(self):
        svg = (ROOT / "docs/step.svg").read_text()
        self.assertEqual(len(bars_of(svg, "backward")), 2)
        for begin, end in bars_of(svg, "backward"):
            inside = [b for b in bars_of(svg, "bucket") if begin < b[0] < end]
            self.assertGreater(len(inside), 1, "buckets leave while the backward pass runs")


unittest.main()
