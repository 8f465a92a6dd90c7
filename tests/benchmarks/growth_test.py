"""Checks the page of benchmarks/report/growth.py: its fits, and its tables from made up records.

usage: growth_test.py <the repository> <ddp_plan>
"""

import json
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree

PLAN = sys.argv.pop(2)
ROOT = pathlib.Path(sys.argv.pop(1))
sys.path.append(str(ROOT / "benchmarks/report"))

import growth

MIB = 1 << 20


class Fits(unittest.TestCase):
    def test_a_line(self):
        start, slope, r2 = growth.fit_line([(10, 25.0), (100, 205.0), (1000, 2005.0)])
        self.assertAlmostEqual(start, 5)
        self.assertAlmostEqual(slope, 2)
        self.assertAlmostEqual(r2, 1)

    def test_r2_of_what_is_no_line(self):
        self.assertLess(growth.fit_line([(1, 1.0), (2, 1.0), (3, 9.0), (4, 1.0)])[2], 0.1)

    def test_all_reduces(self):
        points = [(n, 2e-3 + n * 1e-6) for n in (4, 4096, 1 << 28)]
        alpha, beta = growth.fit_all_reduce(points)
        self.assertAlmostEqual(alpha, 1e-3)
        self.assertAlmostEqual(beta, 1e-6)

    def test_no_coefficient_is_below_0(self):
        alpha, beta = growth.fit_all_reduce([(1000, 1e-6), (2000, 3e-6), (4000, 7e-6)])
        self.assertEqual(alpha, 0)
        self.assertGreater(beta, 0)
        alpha, beta = growth.fit_all_reduce([(1000, 7e-6), (2000, 3e-6), (4000, 1e-6)])
        self.assertGreater(alpha, 0)
        self.assertEqual(beta, 0)


class Written(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name) / "results"
        self.output = pathlib.Path(folder.name) / "output"
        self.results.mkdir()

    def put(self, name, *records):
        path = self.results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def write(self):
        growth.sys.argv = ["growth.py", str(self.results), str(self.output), PLAN]
        growth.main()
        return (self.output / "GROWTH.md").read_text()

    def put_link(self, rate, carried, steps):
        """A link, and steps of (mode, cap, seconds) of a model with 80 MB of gradients."""
        self.put(f"link_{rate:g}/mlp-sweep-cpp.jsonl", *(
            {"model": "mlp", "mode": mode, "backend": "gloo", "world": 2, "bucket_cap_mb": cap,
             "step_ms": 1e3 * seconds, "compute_ms": 1500.0, "comm_ms": 5000.0, "bytes": 80_000_000}
            for mode, cap, seconds in steps))
        self.put(f"link_{rate:g}/all_reduce/gloo.jsonl",
                 {"what": "gloo", "bytes": 4096, "us": 1000 * rate},
                 {"what": "gloo", "bytes": MIB, "us": 9e6})
        (self.results / f"link_{rate:g}/rate.txt").write_text(
            f"One TCP connection carries {carried} Gbit/s over it.\n")

    def test_what_was_not_measured_has_no_section(self):
        self.assertNotIn("##", self.write())

    def test_ddp_plan_beside_steps(self):
        steps = (("none", None, 1.5), ("flat", None, 9.0), ("ddp", None, 2.0), ("ddp", 25.0, 1.6),
                 ("ddp_tuned", 5.0, 2.0))
        self.put_link(0.1, 0.08, steps)
        self.put_link(1, 0.8, steps)
        text = self.write()
        self.assertIn("an all-reduce of 4 KiB: 275 us", " ".join(text.split()))
        # 8 s on the wire, of which backward hides 2/3 of 1.5 s.
        self.assertIn("| 0.1 | mlp | ddp | default | 1500 | 2000 | 8501 | +325% |", text)
        # 0.8 s, of which the last bucket, 26.2144 of 80 MB, is not hidden.
        self.assertIn("| 1 | mlp | ddp | 25 MiB | 1500 | 1600 | 1762 | +10% |", text)
        self.assertIn("| 1 | mlp | ddp_tuned | 5 MiB | 1500 | 2000 | 1762 | -12% |", text)
        self.assertIn("The mean error is 186%, the largest 431%.", text)
        # A ring of 8 ranks: 14 (10 us + 10 MB * 8 / 25 Gbit/s) = 44.94 ms, 26.2144 / 80 of it at the end.
        self.assertIn("| mlp | 25 | 1.010 | ", text)

    def test_all_sections(self):
        self.put("collectives/gloo.jsonl", *(
            {"what": "gloo", "ranks": 2, "bytes": n, "us": 100 + n / 1000, "us_p10": 0, "us_p90": 0,
             "repetitions": 3} for n in (4096, MIB)))
        self.put("parameters/steps.jsonl", *(
            {"mode": mode, "ranks": 2, "parameters": n, "step_us": 10.0 * n,
             "above_none_us": 0.0 if mode == "none" else 3 + 2.5 * n}
            for n in (10, 100, 1000) for mode in ("none", "ddp")))
        self.put("setup/few.jsonl", *(
            {"kind": "ddp, gloo", "ranks": n, "init_s": 0.1 * n, "wrap_s": 0.01} for n in (2, 8)))
        self.put("setup/spawned.jsonl", *(
            {"kind": "spawned, default", "ranks": n, "init_s": 0.01 * n, "wrap_s": 0.5, "step_s": 0.25,
             "own_mb": 5.04, "host_mb": 4.96} for n in (256, 64)))
        self.put_link(1, 0.8, (("none", None, 1.5), ("flat", None, 9.0), ("ddp", None, 2.0),
                               ("ddp", 1.0, 2.0), ("ddp", 5.0, 2.1), ("ddp", 25.0, 2.2),
                               ("ddp_tuned", 5.0, 2.02)))
        text = self.write()
        self.assertIn("| gloo | 100 | 1 | 0% | 0% |", text)
        self.assertIn("| ddp | 2500 | 3 | 1.0000 | linear |", text)
        self.assertIn("| 8 | 0.800 | 0.010 |", text)
        self.assertIn(
            "| 64 | 0.640 | 0.500 | 0.250 | 5.0 | 5.0 |\n| 256 | 2.560 | 0.500 | 0.250 | 5.0 | 5.0 |", text)
        self.assertRegex(text, r"\| mlp \| ddp \| 0\.\d+ x the wire alone \| 1.05 \| met \|")
        self.assertIn("| 1 | mlp | 5 MiB | 2020 | 1 MiB | 2000 | +1.0% | met |", text)
        for name in ("all_reduce", "parameters", "setup_init"):
            xml.etree.ElementTree.parse(self.output / f"plots/growth_{name}.svg")


if __name__ == "__main__":
    unittest.main()
