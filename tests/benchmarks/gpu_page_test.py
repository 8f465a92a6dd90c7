"""Checks benchmarks/report/gpu_page.py with files as scripts/gpu_check.sh leaves them, and the page with those of
benchmarks/gpu.

usage: gpu_page_test.py <the repository>
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1))
PEERS = ROOT / "benchmarks/peers"
sys.path += [str(ROOT / "benchmarks/report"), str(PEERS)]

import gpu_page


def write(path, lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(mode, ratio):
    return {"model": "m", "mode": mode, "step_ms": 10 * ratio, "ratio": ratio, "ratio_of_rounds": [ratio] * 6,
            "cpu_ms": 1, "compute_ms": 10}


def calls(by, ranks, name, launches, **fields):
    return {"part": "census", "name": name, "by": by, "ranks": ranks, "ran_ahead": True, "launches": launches,
            "copies": 2, "event_records": 3.5, "stream_waits": 4, "synchronizations": 0, **fields}


class Page(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name) / "nvidia-h200-2030-01-02"
        self.folder.mkdir()

    def tearDown(self):
        self.temporary.cleanup()

    def test_nothing_was_measured(self):
        self.assertEqual(
            gpu_page.page_of(self.folder),
            "Made by `benchmarks/report/gpu_page.py` from `benchmarks/gpu/nvidia-h200-2030-01-02`.")

    def test_steps_of_both_languages(self):
        write(self.folder / "steps/resnet18-float32-x1-cpp.jsonl", [step("none", 1), step("ddp", 1.02), step("ddp_hook", 1.05)])
        write(self.folder / "steps/resnet18-float32-x1-py.jsonl", [step("none", 1), step("py_ddp", 1.3)])
        self.assertIn(
            "| resnet18, float32, batch x 1 | 10.0 | 1.02 (1.02 to 1.02) | 1.05 (1.05 to 1.05) | 1.30 (1.30 to 1.30) | - |",
            gpu_page.page_of(self.folder))

    def test_calls_beside_pythons(self):
        write(self.folder / "census.jsonl", [
            calls("C++", 2, "ddp", 30), calls("C++", 2, "zero2", 40, ran_ahead=False, synchronizations=5),
            calls("Python", 2, "ddp", 80.5, copies=0), calls("C++", 1, "ddp", 12)])
        text = gpu_page.page_of(self.folder)
        self.assertIn("| 2 | ddp | 30 / 80.5 | 2 / 0 | 3.5 / 3.5 | 4 / 4 | 0 / 0 | yes |", text)
        self.assertIn("| 2 | zero2 | 40 / - | 2 / - | 3.5 / - | 4 / - | 5 / - | no |", text)
        self.assertIn("| 1 | ddp | 12 / - |", text)

    def test_memory_and_times(self):
        mib = 2**20
        write(self.folder / "memory.jsonl", [
            {"part": "memory", "name": "fsdp", "by": "C++", "ranks": 2, "peak_bytes": 110 * mib, "rest_bytes": 50 * mib,
             "expected_bytes": 100 * mib}])
        write(self.folder / "times.jsonl", [
            {"part": "times", "name": "clip_800", "by": "C++", "ranks": 1, "ms": 0.5},
            {"part": "times", "name": "clip_800", "by": "Python", "ranks": 1, "ms": 0.75}])
        write(self.folder / "fsdp.jsonl", [{"mode": "fsdp", "step_ms": 2}, {"mode": "py_fsdp", "step_ms": 3}])
        text = gpu_page.page_of(self.folder)
        self.assertIn("| 2 | fsdp | 110 | 100 | 1.10 | 50 |", text)
        self.assertIn("| clip_800 | 0.500 | 0.750 |", text)
        self.assertIn("| step of eight layers, fsdp | 2.000 | - |", text)
        self.assertIn("| step of eight layers, py_fsdp | - | 3.000 |", text)

    def run_script(self, *arguments):
        command = [sys.executable, "-B", ROOT / "benchmarks/report/gpu_page.py", self.folder, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    def test_writes_the_page(self):
        page = self.folder / "page.md"
        page.write_text(f"# Page\n\n{gpu_page.BEGIN}\nold\n{gpu_page.END}\n\nrest\n")
        write(self.folder / "census.jsonl", [calls("C++", 2, "ddp", 30)])
        self.assertEqual(self.run_script("--page", page, "--check").returncode, 1)
        self.assertEqual(self.run_script("--page", page).returncode, 0)
        text = page.read_text()
        self.assertTrue(text.startswith(f"# Page\n\n{gpu_page.BEGIN}\nMade by "), text)
        self.assertTrue(text.endswith(f"\n{gpu_page.END}\n\nrest\n"), text)
        self.assertNotIn("old", text)
        self.assertEqual(self.run_script("--page", page, "--check").returncode, 0)

    def test_a_page_without_its_lines(self):
        page = self.folder / "page.md"
        page.write_text("# Page\n")
        run = self.run_script("--page", page)
        self.assertEqual(run.returncode, 1)
        self.assertIn("expected lines '<!-- gpu_page: begin -->'", run.stderr)
        self.assertEqual(page.read_text(), "# Page\n")

    def test_the_documentation_has_the_latest_results(self):
        results = sorted((ROOT / "benchmarks/gpu").glob("*-20*"), key=lambda folder: folder.name[-10:])
        page = (ROOT / "docs/gpus.md").read_text()
        self.assertIsNotNone(gpu_page.with_tables(page, ""), "docs/gpus.md lacks the lines of the tables")
        if results:
            self.assertEqual(page, gpu_page.with_tables(page, gpu_page.page_of(results[-1])))


class Census(unittest.TestCase):
    """Names are the same in both languages: a row has no number of Python's where they differ."""

    def names(self, path, call):
        text = path.read_text()
        return {text[at:].split('"')[1] for at in (i for i in range(len(text)) if text.startswith(call + '("', i))}

    def test_names_of_python_are_ours(self):
        folder = ROOT / "tests/ddp/cuda/census"
        ours = {word for path in folder.glob("*.cpp") for word in path.read_text().split('"')[1::2]}
        peer = PEERS / "cuda_census.py"
        theirs = self.names(peer, "census_wrapper") | self.names(peer, "count_calls")
        self.assertIn("ddp_hook", theirs)
        self.assertLessEqual(theirs - {"zero1"}, ours)
        self.assertLessEqual(self.names(peer, "say_time") - {"adamw_800_foreach"}, ours)


if __name__ == "__main__":
    unittest.main()
