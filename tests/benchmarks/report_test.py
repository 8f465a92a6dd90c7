"""Checks benchmarks/report and the peers' statistics.

usage: report_test.py <the repository>
"""

import json
import pathlib
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop(1))
sys.path += [str(ROOT / "benchmarks/report"), str(ROOT / "benchmarks/peers")]

import report
import svg
import tables
from memory_sampler import MemorySampler, own_bytes, parse_pss
from peer_statistics import median_interval, overlap, paired_ratio, quantile


def line(mode, step, **fields):
    record = {
        "model": "mlp", "mode": mode, "backend": "gloo", "world": 2, "bucket_cap_mb": None,
        "step_ms": step, "step_ms_p10": step - 1, "step_ms_p90": step + 1, "cpu_ms": step + 5,
        "compute_ms": 100.0,
        "comm_ms": 0.0 if mode == "none" else 50.0, "overlap": 0.5,
        "bytes": 0 if mode == "none" else 4000, "checksum": 7.5,
    }
    record.update(fields)
    ratio = step / record["compute_ms"]
    return {**ratios("ratio", [ratio]), **ratios("cpu_ratio", [ratio]), **record}


def ratios(name, of_rounds):
    """The ratios of a line, without the interval that the report computes itself."""
    return {name: quantile(of_rounds, 0.5), f"{name}_of_rounds": of_rounds}


def memory(mode, peak, **fields):
    record = {
        "model": "mlp", "mode": mode, "backend": "shm", "world": 2, "bytes": 50_000_000,
        "peak_bytes": peak, "anonymous_bytes": peak - 10_000_000, "shared_bytes": 10_000_000,
        "file_bytes": 90_000_000,
    }
    return {**record, **fields}


class Statistics(unittest.TestCase):
    # statistics_test.cpp has the same values.
    def test_quantile(self):
        self.assertEqual(quantile([3], 0.1), 3)
        self.assertEqual(quantile([4, 1, 3, 2], 0.5), 2.5)
        self.assertEqual(quantile([5, 1, 3], 0.5), 3)
        self.assertAlmostEqual(quantile([10, 20, 30, 40, 50], 0.1), 14)
        self.assertAlmostEqual(quantile([10, 20, 30, 40, 50], 0.9), 46)
        self.assertEqual(quantile([2, 1], 1), 2)

    def test_overlap(self):
        self.assertEqual(overlap(50, 100, 150), 0)
        self.assertEqual(overlap(50, 100, 100), 0.5)
        self.assertEqual(overlap(100, 50, 100), 1)
        self.assertEqual(overlap(100, 50, 90), 1)
        self.assertEqual(overlap(100, 50, 200), 0)
        self.assertEqual(overlap(100, 0, 90), 0)


    def test_median_interval(self):
        for count, low, high in ((6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15),
                                 (50, 18, 33), (100, 40, 61)):
            values = [(i * 7 + 3) % count + 1 for i in range(count)]
            self.assertEqual(median_interval(values), (low, high))
        self.assertEqual(median_interval([2.5] * 3000), (2.5, 2.5))
        self.assertIsNone(median_interval([1, 2, 3, 4, 5]))

    def test_paired_ratio(self):
        base = [10, 20, 30, 40, 50, 600, 70]
        median, interval, of_rounds = paired_ratio([11, 22, 33, 400, 55, 66, 77], base)
        self.assertAlmostEqual(median, 1.1)
        self.assertEqual(of_rounds[3], 10)
        self.assertAlmostEqual(interval[0], 0.11)
        self.assertEqual(interval[1], 10)


class Memory(unittest.TestCase):
    # memory_sampler_test.cpp has the same text.
    def test_a_rollup_tells_the_memory_by_kind(self):
        pss = parse_pss(
            "563e7c2bb000-7fffea352000 ---p 00000000 00:00 0                          [rollup]\n"
            "Rss:              686848 kB\n"
            "Pss:              531470 kB\n"
            "Pss_Dirty:        431470 kB\n"
            "Pss_Anon:         420000 kB\n"
            "Pss_File:          71470 kB\n"
            "Pss_Shmem:         40000 kB\n"
            "Swap:                  0 kB\n"
            "SwapPss:               0 kB\n"
        )
        expected = {"anonymous_bytes": 420000, "shared_bytes": 40000, "file_bytes": 71470}
        self.assertEqual(pss, {kind: 1024 * size for kind, size in expected.items()})
        self.assertEqual(own_bytes(pss), 460000 * 1024)
        self.assertIsNone(parse_pss("Rss: 12 kB\nPss: 12 kB\n"))

    def test_the_peak_is_kept(self):
        sampler = MemorySampler()
        before = own_bytes(sampler.peak)
        block = bytearray(b"x") * (64 << 20)
        while own_bytes(sampler.peak) < before + (60 << 20):
            time.sleep(0.001)
        del block
        self.assertGreater(own_bytes(sampler.stop()), before + (60 << 20))


class Written(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name) / "results"
        self.output = pathlib.Path(folder.name) / "output"
        self.results.mkdir()
        self.output.mkdir()

    def put_text(self, name, text):
        path = self.results / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def put(self, name, *records):
        self.put_text(name, "".join(json.dumps(record) + "\n" for record in records))

    def write(self):
        report.Report(self.results, self.output).write()
        return (self.output / "RESULTS.md").read_text()

    def picture(self, name):
        return xml.etree.ElementTree.parse(self.output / "plots" / name).getroot()

    def test_ratios_are_of_one_process(self):
        # The second process ran on a machine half as fast: medians of times would say 1.8.
        self.put("steps/mlp-1-cpp.jsonl", line("none", 100.0), line("ddp", 120.0))
        slow = {"compute_ms": 200.0, "comm_ms": 100.0}
        self.put("steps/mlp-2-cpp.jsonl", line("none", 200.0, **slow), line("ddp", 280.0, **slow))
        text = self.write()
        self.assertIn(
            "| ddp | 200.0 | 199.0-201.0 | 1.300 | needs 6 rounds | 1.200-1.400 | 205.0 | 1.300 | "
            "needs 6 rounds | 75.0 | - |",
            text,
        )
        self.assertIn("| mlp | 1.300 x none | needs 6 rounds | 1.1 | missed by 18.2% |", text)

    def test_intervals_are_of_the_rounds_of_all_processes(self):
        step = [[1.1, 1.2, 1.3, 1.4], [1.15, 1.25, 1.35, 1.45, 9.0]]
        for index, of_rounds in enumerate(step):
            cpu = [ratio - 0.05 for ratio in of_rounds]
            fields = {**ratios("ratio", of_rounds), **ratios("cpu_ratio", cpu)}
            self.put(f"steps/mlp-{index}-cpp.jsonl", line("none", 100.0), line("ddp", 130.0, **fields))
        text = self.write()
        # The second and the eighth of nine rounds.
        self.assertIn(
            "| 1.300 | 1.150-1.450 | 1.250-1.350 | 135.0 | 1.250 | 1.100-1.400 |", text
        )
        self.assertIn("| mlp | 1.300 x none | 1.150-1.450 | 1.1 | missed by 18.2% |", text)
        self.assertIn("| none | 100.0 | 99.0-101.0 |  |  |  | 105.0 |  |", text)

    def test_memory_is_above_none_of_the_same_language(self):
        for index, more in enumerate((0, 2_000_000, 30_000_000)):
            modes = {"none": 100_000_000, "c10d": 230_000_000, "ddp": 155_000_000 + more}
            modes["ddp_view"] = 160_000_000
            lines = [memory(mode, peak) for mode, peak in modes.items()]
            self.put(f"memory/mlp-{index}-cpp.jsonl", *lines)
        self.put("memory/mlp-0-py.jsonl", memory("none", 300_000_000), memory("py_ddp", 400_000_000))
        text = self.write()
        self.assertIn("## Peak memory", text)
        self.assertIn("### mlp, 50.0 MB of gradients", text)
        for row in (
            "| none | 100.0 | 100.0 | 90.0 | 10.0 |  |  |  |  |",
            "| c10d | 230.0 | 230.0 | 220.0 | 10.0 | 130.0 | 2.60 |  |  |",
            "| ddp | 157.0 | 155.0-185.0 | 147.0 | 10.0 | 57.0 | 1.14 | 155.0 | missed by 1.3% |",
            "| none, Python | 300.0 | 300.0 | 290.0 | 10.0 |  |  |  |  |",
            "| py_ddp | 400.0 | 400.0 | 390.0 | 10.0 | 100.0 | 2.00 |  |  |",
        ):
            self.assertIn(row, text)
        self.assertIn("| ddp_view | 160.0 |", text)

    def test_a_target_that_is_met(self):
        self.put("steps/mlp-1-cpp.jsonl", line("none", 100.0), line("ddp", 110.0))
        self.assertIn("| mlp | 1.100 x none | needs 6 rounds | 1.1 | met |", self.write())

    def test_other_bucket_sizes_and_modes_are_no_target(self):
        self.put("steps/mlp-1-cpp.jsonl", line("none", 100.0), line("ddp", 110.0, bucket_cap_mb=5.0))
        self.assertNotIn("## Targets", self.write())

    def test_python_is_beside_and_compared(self):
        self.put("steps/mlp-1-cpp.jsonl", line("none", 100.0), line("ddp", 125.0))
        self.put("steps/mlp-1-py.jsonl", line("none", 110.0), line("py_ddp", 150.0))
        text = self.write()
        self.assertIn("| none, Python | 110.0 |", text)
        self.assertLess(text.index("| ddp |"), text.index("| py_ddp |"))
        self.assertIn("same checksum, to the last digit", text)

    def test_other_parameters_are_told(self):
        self.put("steps/mlp-1-cpp.jsonl", line("ddp", 125.0))
        self.put("steps/mlp-1-py.jsonl", line("py_ddp", 150.0, checksum=7.5 * (1 + 1e-9)))
        self.assertIn("agree to 1e-09 of their size, but for rounding", self.write())
        self.put("steps/mlp-1-py.jsonl", line("py_ddp", 150.0, checksum=7.6))
        self.assertIn("MORE THAN ROUNDING", self.write())
        self.put("steps/mlp-1-py.jsonl", line("py_ddp", 150.0, checksum=None))
        self.assertIn("diverged", self.write())

    def test_sweeps_become_a_picture(self):
        caps = (1.0, 5.0, 25.0)
        records = [line("ddp", 110.0 + cap, bucket_cap_mb=cap) for cap in caps]
        records += [line("c10d", 150.0, bucket_cap_mb=cap) for cap in caps[:2]]
        self.put("sweep/mlp-1-cpp.jsonl", line("none", 100.0), *records)
        self.assertIn("![steps of mlp over none, by bucket size](plots/sweep_mlp.svg)", self.write())
        lines = self.picture("sweep_mlp.svg").findall("{*}polyline")
        self.assertEqual([len(one.get("points").split()) for one in lines], [2, 3])

    def test_a_step_becomes_a_picture(self):
        spans = [
            {"track": "compute", "name": "forward", "start_ms": 0, "end_ms": 3, "bytes": 0},
            {"track": "communication", "name": "bucket 0", "start_ms": 2, "end_ms": 4, "bytes": 8},
        ]
        step = {"model": "mlp", "mode": "ddp", "world": 2, "ranks": [spans, spans]}
        self.put("timeline/mlp.json", step)
        self.assertIn("plots/timeline_mlp.svg", self.write())
        titles = [title.text for title in self.picture("timeline_mlp.svg").findall(".//{*}title")]
        self.assertEqual(titles.count("bucket 0: 2.00 to 4.00 ms"), 2)

    def test_links_have_targets_of_their_own(self):
        # The communication time is that of flat's one message, not of ddp's buckets.
        flat = line("flat", 90.0, comm_ms=50.0)
        self.put("link_10/mlp-1-cpp.jsonl", line("none", 100.0), flat, line("ddp", 125.0))
        ddp = line("ddp", 52.0, comm_ms=40.0)
        self.put("link_1/mlp-1-cpp.jsonl", line("none", 100.0), flat, ddp)
        self.put_text("link_1/rate.txt", "One TCP connection carries 0.957 Gbit/s.\n")
        text = self.write()
        self.assertIn("carries 0.957", text)
        self.assertIn("| mlp | 1.040 x communication alone |  | 1.05 | met |", text)
        self.assertEqual(text.count("communication alone"), 1)
        self.assertIn("| 57.0 | 0.520 | needs 6 rounds | 40.0 | 1.040 |", text)
        self.assertLess(text.index("of 1 Gbit/s"), text.index("of 10 Gbit/s"))

    def test_without_flat_there_is_no_communication_alone(self):
        self.put("link_1/mlp-1-cpp.jsonl", line("none", 100.0), line("ddp", 52.0))
        # Another process's line must not be compared with this one.
        self.put("link_1/mlp-2-cpp.jsonl", line("none", 100.0), line("flat", 90.0))
        self.assertIn("| mlp | - |  | 1.05 |  |", self.write())

    def test_tuning_is_compared_with_the_sweep_of_the_same_process(self):
        caps = [line("ddp", 100.0 + cap, bucket_cap_mb=cap) for cap in (20.0, 10.0, 25.0)]
        # Alone it took longer, because of another load on the machine: the page must not mention
        # the sweep.
        alone = line("ddp_tuned", 150.0, bucket_cap_mb=50.0)
        self.put("steps/mlp-1-cpp.jsonl", line("none", 100.0), alone)
        tuned = line("ddp_tuned", 112.2, bucket_cap_mb=12.5)
        self.put("sweep/mlp-1-cpp.jsonl", line("none", 100.0), *caps, tuned)
        text = self.write()
        self.assertIn("| mlp | 12.5 MiB | 1.122 | 10 MiB | 1.100 | +2.0% | met |", text)
        self.put("sweep/mlp-1-cpp.jsonl", line("none", 100.0), *caps)
        text = self.write()
        self.assertIn("| mlp | 50 MiB | 1.500 | 10 MiB | 1.100 | +36.4% | missed by 32.4% |", text)
        # A chosen size is not a point of the sweep.
        lines = self.picture("sweep_mlp.svg").findall("{*}polyline")
        self.assertEqual([len(one.get("points").split()) for one in lines], [3])

    def test_links_have_sweeps_of_their_own(self):
        told = [line("ddp", 115.0 + cap, bucket_cap_mb=cap) for cap in (5.0, 10.0, 25.0)]
        for rate, step in (("1", 120.0), ("10", 132.0)):
            tuned = line("ddp_tuned", step, bucket_cap_mb=5.0)
            self.put(f"link_{rate}/mlp-sweep-cpp.jsonl", line("none", 100.0), *told, tuned)
        text = self.write()
        self.assertIn("| mlp | 5 MiB | 1.200 | 5 MiB | 1.200 | +0.0% | met |", text)
        self.assertIn("| mlp | 5 MiB | 1.320 | 5 MiB | 1.200 | +10.0% | missed by 6.8% |", text)

    def test_sweeps_over_loopback_stand_apart(self):
        told = [line("ddp", 130.0 - cap, bucket_cap_mb=cap) for cap in (1, 5, 10)]
        self.put("loopback/mlp-1-cpp.jsonl", line("none", 100.0), *told, line("ddp_tuned", 121.0))
        text = self.write()
        self.assertIn("## Over Gloo on one host", text)
        self.assertIn("| mlp |  | 1.210 | 10 MiB | 1.200 | +0.8% | met |", text)
        self.assertIn("### mlp", text)
        self.assertNotIn("## Bucket sizes", text)

    def test_a_sweep_of_few_sizes_is_no_judge(self):
        told = [line("ddp", 115.0 + cap, bucket_cap_mb=cap) for cap in (5.0, 10.0)]
        tuned = line("ddp_tuned", 120.0, bucket_cap_mb=5.0)
        self.put("sweep/mlp-1-cpp.jsonl", line("none", 100.0), *told, tuned)
        self.assertIn("| mlp | 5 MiB | 1.200 | 5 MiB | 1.200 | +0.0% |  |", self.write())

    def test_what_is_tuned_is_one_mode_whatever_it_chose(self):
        for index, (cap, step) in enumerate(((10.0, 120.0), (5.0, 130.0), (10.0, 140.0))):
            tuned = line("ddp_tuned", step, bucket_cap_mb=cap)
            self.put(f"steps/mlp-{index}-cpp.jsonl", line("none", 100.0), tuned)
        text = self.write()
        self.assertIn("| ddp_tuned, 5 or 10 MiB | 130.0 |", text)
        self.assertEqual(text.count("| ddp_tuned,"), 1)
        self.assertIn("| mlp | 5 or 10 MiB | 1.300 | - | - | - |  |", text)

    def test_a_range_of_negative_numbers_can_be_read(self):
        self.assertEqual(tables.span([-0.3, -0.1], "{:.1f}"), "-0.3 to -0.1")
        self.assertEqual(tables.span([0.1, 0.3], "{:.1f}"), "0.1-0.3")

    def test_overhead_is_of_all_processes(self):
        header = "engine            step ms   above none us / parameter\n"
        for process, (plain, unused) in {"1": (0.3, 0.9), "2": (0.5, 0.7), "3": (0.4, 1.0)}.items():
            # The second machine is half as fast.
            pace = 2 if process == "2" else 1
            self.put_text(
                f"overhead/{process}.txt",
                f"{header}none               12.000        0.000          0.000\n"
                f"ddp                12.400 {plain:12.3f}          0.500\n"
                f"ddp, unused        12.900 {unused:12.3f}          1.125\n"
                f"c10d               16.000 {4.0 * pace:12.3f}          5.000\n"
                f"c10d, unused       17.000        5.000          6.250\n",
            )
        text = self.write()
        self.assertIn("## The reducer alone", text)
        self.assertIn("| none | 12.00 |  |  |  |  |  |", text)
        self.assertIn("| ddp | 12.40 | 0.400 | 0.300-0.500 | 0.075 | 0.08 | met |", text)
        self.assertIn(
            "| ddp, unused | 12.90 | 0.900 | 0.700-1.000 | 0.180 | 0.15 | missed by 20.0% |", text
        )
        self.assertIn("| c10d | 16.00 | 4.000 | 4.000-8.000 |  |  |  |", text)


class Drawing(unittest.TestCase):
    def test_ticks_are_round_and_inside(self):
        self.assertEqual(list(svg.ticks(0, 10, 5)), [0, 2, 4, 6, 8, 10])
        self.assertEqual(list(svg.ticks(130, 700, 6)), [200, 300, 400, 500, 600, 700])

    def test_spans_at_the_same_time_lie_in_lanes(self):
        spans = [("a", 0, 4, 0), ("b", 1, 2, 0), ("c", 2, 6, 0), ("d", 4, 5, 0), ("e", 5, 6, 0)]
        self.assertEqual(svg.lanes_of(spans), [0, 1, 1, 0, 0])
        self.assertEqual(svg.lanes_of([("a", 0, 1, 0), ("b", 1, 2, 0)]), [0, 0])

    def test_names_are_escaped(self):
        chart = svg.line_chart("a < b & c", ["1"], [("<x>", [1.0])], "x", "y")
        xml.etree.ElementTree.fromstring(chart)


class Verdict(unittest.TestCase):
    def test_a_ratio_at_its_target_meets_it(self):
        self.assertEqual(tables.verdict(1.04, 1.04), "met")
        self.assertEqual(tables.verdict(1.0816, 1.04), "missed by 4.0%")


unittest.main()
