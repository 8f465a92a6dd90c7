"""Checks benchmarks/costs/cost_model.py against values computed by hand, and the page made from it.

usage: growth_model_test.py <the repository>
"""

import json
import math
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop(1))
sys.path += [str(ROOT / "benchmarks/costs"), str(ROOT / "benchmarks/report")]

import cost_model
import growth
import growth_model
from cost_model import MIB, Link, Profile

LINK = Link(alpha=1e-3, beta=1e-6)  # a message of 1000 bytes takes 2 ms


class Algorithms(unittest.TestCase):
    def test_two_ranks(self):
        # Each sends half, then the other half.
        self.assertAlmostEqual(cost_model.ring(1000, 2, LINK), 2 * 1e-3 + 1e-3)
        self.assertAlmostEqual(cost_model.halving_doubling(1000, 2, LINK), 2 * 1e-3 + 1e-3)
        self.assertAlmostEqual(cost_model.recursive_doubling(1000, 2, LINK), 1e-3 + 1e-3)

    def test_eight_ranks(self):
        self.assertAlmostEqual(cost_model.ring(8000, 8, LINK), 14 * 1e-3 + 14 * 1e-3)
        self.assertAlmostEqual(cost_model.halving_doubling(8000, 8, LINK), 6 * 1e-3 + 14 * 1e-3)
        self.assertAlmostEqual(cost_model.recursive_doubling(8000, 8, LINK), 3 * 1e-3 + 24 * 1e-3)
        # sqrt(2 * 8000 * 1e-6 / 1e-3) = 4 chunks, in 2 * (3 + 4 - 1) rounds of 1 + 2 ms.
        self.assertAlmostEqual(cost_model.two_trees(8000, 8, LINK), 12 * 3e-3)

    def test_the_cheapest_by_size(self):
        def best(size, ranks):
            times = {name: f(size, ranks, LINK) for name, f in cost_model.ALGORITHMS.items()}
            return min(times, key=times.get)

        self.assertEqual(best(4, 1024), "recursive doubling")
        self.assertEqual(best(10 ** 9, 1024), "halving and doubling")
        ring = cost_model.ring(10 ** 9, 1024, LINK)
        self.assertLess(ring, cost_model.two_trees(10 ** 9, 1024, LINK))
        self.assertGreater(cost_model.ring(10 ** 6, 1024, LINK), cost_model.two_trees(10 ** 6, 1024, LINK))


class Fits(unittest.TestCase):
    def test_a_line(self):
        start, slope, r2 = cost_model.fit_line([(10, 25.0), (100, 205.0), (1000, 2005.0)])
        self.assertAlmostEqual(start, 5)
        self.assertAlmostEqual(slope, 2)
        self.assertAlmostEqual(r2, 1)

    def test_r2_of_what_is_no_line(self):
        self.assertLess(cost_model.fit_line([(1, 1.0), (2, 1.0), (3, 9.0), (4, 1.0)])[2], 0.1)

    def test_all_reduces(self):
        points = [(n, cost_model.ring(n, 2, LINK)) for n in (4, 4096, 1 << 28)]
        link = cost_model.fit_all_reduce(points)
        self.assertAlmostEqual(link.alpha, LINK.alpha)
        self.assertAlmostEqual(link.beta, LINK.beta)

    def test_no_coefficient_is_below_0(self):
        link = cost_model.fit_all_reduce([(1000, 1e-6), (2000, 3e-6), (4000, 7e-6)])
        self.assertEqual(link.alpha, 0)
        self.assertGreater(link.beta, 0)

    def test_wires_of_all_rates(self):
        wires = cost_model.Wires(alpha=1e-4, wire=1.07, host=5e-10)
        points = [
            (rate, n, cost_model.ring(n, 2, wires.link(rate))) for rate in (0.1, 1) for n in (4096, MIB)
        ]
        fitted = cost_model.fit_wires(points, host=5e-10)
        self.assertAlmostEqual(fitted.alpha, 1e-4)
        self.assertAlmostEqual(fitted.wire, 1.07)
        self.assertEqual(fitted.link(100).beta, 5e-10)  # a wire that is faster than the hosts


def even_profile():
    """Forward 1 s; ten gradients of 1 MiB, one every 0.1 s; the optimizer takes 0.5 s."""
    return Profile(1.0, 2.5, tuple((MIB, 1.1 + 0.1 * i) for i in range(10)))


class Steps(unittest.TestCase):
    def test_buckets_close_once_they_have_their_cap(self):
        gradients = [(3, 1.0), (3, 2.0), (9, 3.0), (1, 4.0)]
        self.assertEqual(cost_model.plan(gradients, (5,)), [(6, 2.0), (9, 3.0), (1, 4.0)])
        self.assertEqual(cost_model.plan(gradients, (3, 10)), [(3, 1.0), (12, 3.0), (1, 4.0)])

    def test_hidden_but_for_the_last_bucket(self):
        cost = cost_model.step(even_profile(), (2 * MIB,), lambda size: 0.15)
        self.assertAlmostEqual(cost.time, 2.0 + 0.15 + 0.5)
        self.assertAlmostEqual(cost.communication, 5 * 0.15)
        self.assertAlmostEqual(cost.overlapped, 8 * MIB)
        self.assertAlmostEqual(cost.queued, 0)

    def test_a_wire_that_is_always_busy(self):
        cost = cost_model.step(even_profile(), (2 * MIB,), lambda size: 1.0)
        self.assertAlmostEqual(cost.time, 1.2 + 5 * 1.0 + 0.5)
        self.assertAlmostEqual(cost.overlapped, 2 * MIB * 0.8)

    def test_what_is_under_way_slows_backward_down(self):
        free = cost_model.step(even_profile(), (2 * MIB,), lambda size: 0.15)
        cost = cost_model.step(even_profile(), (2 * MIB,), lambda size: 0.15, taken=1e-8)
        self.assertAlmostEqual(cost.time - free.time, 8 * MIB * 1e-8)

    def test_a_slower_machine(self):
        scaled = even_profile().scaled(5.0)
        self.assertAlmostEqual(scaled.forward, 2.0)
        self.assertAlmostEqual(scaled.backward_end, 4.0)


class Limits(unittest.TestCase):
    def limit(self, ranks, alpha, seconds_a_mib):
        link = Link(alpha, seconds_a_mib / MIB)
        return cost_model.best_step(even_profile(), ranks, link, caps_mib=(2,), algorithms=("ring",)).limit

    def test_each(self):
        self.assertEqual(self.limit(2, 0, 0.001), "compute")
        self.assertEqual(self.limit(2, 0, 0.09), "last bucket")
        self.assertEqual(self.limit(2, 0, 0.2), "overlap")
        self.assertEqual(self.limit(2, 0, 1.0), "bandwidth")
        self.assertEqual(self.limit(1024, 0.01, 0.001), "latency")

    def test_the_cheapest_is_taken(self):
        cost = cost_model.best_step(even_profile(), 1024, Link(0.01, 1e-9))
        self.assertNotEqual(cost.algorithm, "ring")
        self.assertGreater(cost.ratio, 1)


class Written(unittest.TestCase):
    """From steps that follow the model, the page recovers its constants and predicts the steps."""

    WIRES = cost_model.Wires(alpha=1e-4, wire=1.05, host=3e-9)

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

    def all_reduce(self, what, seconds):
        return [
            {"what": what, "ranks": 2, "bytes": n, "us": 1e6 * seconds(n), "us_p10": 0, "us_p90": 0,
             "repetitions": 3}
            for n in (4096, MIB, 16 * MIB)
        ]

    def step(self, profile, rate, mode, cap):
        link = self.WIRES.link(rate)
        caps = cost_model.DEFAULT_CAPS if cap is None else (cap * MIB,)
        seconds = cost_model.step(
            profile, caps, lambda n: cost_model.ring(n, 2, link), self.WIRES.host
        ).time
        if mode == "none":
            seconds = profile.step
        return {
            "model": "mlp", "mode": mode, "backend": "gloo", "world": 2, "bucket_cap_mb": cap,
            "step_ms": 1e3 * seconds, "step_ms_p10": 0.0, "step_ms_p90": 0.0,
            "compute_ms": 1e3 * profile.step, "comm_ms": 5000.0, "overlap": 0.0, "bytes": 10 * MIB,
            "checksum": 1.0,
        }

    def write(self):
        growth.sys.argv = ["growth.py", str(self.results), str(self.output)]
        growth.main()
        return (self.output / "GROWTH.md").read_text()

    def test_what_was_not_measured_has_no_section(self):
        self.assertNotIn("##", self.write())

    def put_link(self, rate, measured_rate):
        link = self.WIRES.link(measured_rate)
        self.put(
            f"link_{rate:g}/all_reduce/gloo.jsonl",
            *self.all_reduce("gloo", lambda n: cost_model.ring(n if n >= MIB else 0, 2, link)),
        )

    def put_model(self):
        profile = even_profile()
        self.put("model/mlp.json", {
            "model": "mlp", "ranks": 2, "forward_ms": 1000.0, "step_ms": 2500.0,
            "gradients": [[size, 1e3 * ready] for size, ready in profile.gradients],
        })
        # Small messages contain no information on the bandwidth, and one large message is enough.
        host = self.all_reduce("gloo", lambda n: n * 3e-9 if n >= MIB else 5e-3)
        self.put("collectives/gloo.jsonl", *host[:2])
        for rate in (0.1, 1, 10):
            self.put_link(rate, rate)
            modes = (("none", None), ("flat", None), ("ddp", None), ("ddp", 1.0), ("ddp", 5.0),
                     ("ddp", 25.0), ("ddp_tuned", 5.0))
            self.put(f"link_{rate:g}/mlp-sweep-cpp.jsonl",
                     *(self.step(profile, rate, mode, cap) for mode, cap in modes))

    def test_a_rate_is_predicted_from_the_others(self):
        def predicted(of_rate):
            rows = (line.split(" | ") for line in self.write().splitlines())
            return [row for row in rows if len(row) == 8 and row[0] == f"| {of_rate}" and "ddp" in row[2]]

        self.put_model()
        before = predicted("0.1"), predicted("1")
        self.assertEqual(len(before[0]), 5)
        self.put_link(0.1, 0.07)  # contradicts the others
        self.assertEqual(predicted("0.1"), before[0])
        self.assertNotEqual(predicted("1"), before[1])

    def test_all_sections(self):
        self.put_model()
        self.put("parameters/steps.jsonl", *(
            {"mode": mode, "ranks": 2, "parameters": n, "step_us": 10.0 * n,
             "above_none_us": 0.0 if mode == "none" else 3 + 2.5 * n}
            for n in (10, 100, 1000) for mode in ("none", "ddp")))
        self.put("setup/few.jsonl", *(
            {"kind": "ddp, gloo", "ranks": n, "init_s": 0.1 * n, "wrap_s": 0.01} for n in (2, 8)))
        text = self.write()
        self.assertIn("| ddp | 2500 | 3 | 1.0000 | linear |", text)
        self.assertIn("| 8 | 0.800 | 0.010 |", text)
        self.assertIn("alpha 100 us, w 1.050", text)
        self.assertIn("The mean error is 0%, the largest 0%.", text)
        self.assertRegex(text, r"\| mlp \| ddp \| 0\.\d+ x the wire alone \| 1.05 \| met \|")
        self.assertIn("| 1 | mlp | 5 MiB | 2560 | 1 MiB | 2537 | +0.9% | met |", text)
        # 1.2 s until the first bucket, 0.5 s of the optimizer: 2.56 s, where 88 ms are on the wire.
        self.assertIn("takes here: mlp 28.998 x the wire alone and 1.024 x none.", " ".join(text.split()))
        for name in ("all_reduce", "parameters", "setup_init", "model_mlp", "model_1B"):
            xml.etree.ElementTree.parse(self.output / f"plots/growth_{name}.svg")


if __name__ == "__main__":
    unittest.main()
