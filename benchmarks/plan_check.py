"""Compares steps that ddp_plan predicts with steps of examples/transformer on this host.

First measures what ddp_plan asks for: a rank's rate, what a layer takes beside its operations, and
AdamW's time, from three runs of one rank; what a sum over tp takes beside its bytes, from two runs
of two; link and latency from all-reduces of two. Each run lies between two runs of one rank,
because the machine's speed changes. So does then each mesh's, and the script prints what ddp_plan
predicts for the speed of these two runs, the measured step, and their ratio.

    python3 benchmarks/plan_check.py --bin build/release/bin --rounds 5
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
HIDDEN, LAYERS, HEADS, SEQUENCE, BATCH = 256, 4, 8, 64, 16
STEPS, UNTIMED = 7, 2
MANY = 8  # micro-batches
MODEL = [
    "--width", str(HIDDEN), "--layers", str(LAYERS), "--heads", str(HEADS),
    "--context", str(SEQUENCE), "--dropout", "0", "--sample", "0", "--report-every", "1",
    "--steps", str(STEPS), "--warmup", "1",
]


class Mesh:
    """A mesh, and how each of its replicas takes its part of the batch."""

    def __init__(self, name, dp=1, tp=1, pp=1, microbatches=1, schedule="1f1b", fsdp=False):
        self.name, self.dp, self.tp, self.pp = name, dp, tp, pp
        self.microbatches, self.schedule, self.fsdp = microbatches, schedule, fsdp

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp

    def arguments(self):
        rows = BATCH // self.dp
        words = ["--tp", self.tp, "--pp", self.pp]
        if self.pp > 1:
            words += ["--microbatches", self.microbatches, "--schedule", self.schedule]
        else:
            rows //= self.microbatches
            words += ["--accumulate", self.microbatches]
        return [str(w) for w in words + ["--batch-size", rows]] + ["--fsdp"] * self.fsdp

    def is_plan(self, plan):
        return (plan["dp"], plan["tp"], plan["pp"], plan["fsdp"]) == (
            self.dp, self.tp, self.pp, self.fsdp) and plan["schedule"] in ("-", self.schedule)


MESHES = (
    Mesh("dp 2", dp=2),
    Mesh("dp 2, fsdp", dp=2, fsdp=True),
    Mesh("tp 2", tp=2),
    Mesh("pp 2, 8 micro-batches, 1f1b", pp=2, microbatches=8),
    Mesh("pp 2, 8 micro-batches, eager", pp=2, microbatches=8, schedule="eager"),
    Mesh("pp 2, 8 micro-batches, gpipe", pp=2, microbatches=8, schedule="gpipe"),
    Mesh("pp 2, 8 micro-batches, interleaved", pp=2, microbatches=8, schedule="interleaved"),
    Mesh("pp 2, 4 micro-batches, 1f1b", pp=2, microbatches=4),
    Mesh("dp 4", dp=4),
    Mesh("dp 2, tp 2", dp=2, tp=2),
    Mesh("dp 2, pp 2, 8 micro-batches, 1f1b", dp=2, pp=2, microbatches=8),
    Mesh("tp 2, pp 2, 8 micro-batches, 1f1b", tp=2, pp=2, microbatches=8),
)


class Host:
    """Runs programs on this host's cores."""

    def __init__(self, folder, text):
        self.folder, self.text = pathlib.Path(folder), text

    def output(self, *command):
        answer = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        if answer.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {answer.stdout}{answer.stderr}")
        return answer.stdout

    def train(self, ranks, arguments):
        return self.output(
            self.folder / "ddprun", "-n", ranks, self.folder / "transformer", *MODEL,
            "--text", self.text, *arguments)

    def step(self, ranks, arguments):
        """Returns the median of a run's steps, in seconds."""
        output = self.train(ranks, arguments)
        windows, context = map(int, re.search(r", (\d+) windows of (\d+) a step", output).groups())
        rates = [float(rate) for rate in re.findall(r"(\d+) characters/s", output)]
        return statistics.median(windows * context / rate for rate in rates[UNTIMED:])

    def one_rank(self):
        return self.step(1, Mesh("one rank").arguments())

    def plans(self, ranks, batch, microbatches, rates):
        words = [
            "--parameters", self.parameters, "--vocabulary", self.vocabulary, "--layers", LAYERS,
            "--hidden", HIDDEN, "--heads", HEADS, "--sequence", SEQUENCE, "--batch", batch,
            "--ranks", ranks, "--microbatches", microbatches, "--memory", 1000, "--json",
        ]
        for name, value in rates.items():
            words += [f"--{name}", value]
        return json.loads(self.output(self.folder / "ddp_plan", *words))

    def learn_model(self):
        output = self.train(1, ["--batch-size", "1"])
        self.parameters = int(re.search(r"training (\d+) parameters", output)[1])
        self.vocabulary = int(re.search(r", (\d+) different", output)[1])

    def link(self):
        """Returns the rate in GB/s, and the time of a small message in microseconds."""
        lines = self.output(
            self.folder / "ddprun", "-n", 2, self.folder / "costs", "all_reduce", "--no-copies",
            "--sizes", "4096,16777216")
        small, large = [json.loads(line[line.index("{"):]) for line in lines.splitlines()
                        if "its memory" not in line][:2]
        latency = small["us"] / 2  # an all-reduce is two directions of one message each
        # Each direction takes a message of half of the bytes.
        return large["bytes"] / 2 / (large["us"] / 2 - latency) / 1000, latency


def ratios_to_one_rank(host, rounds, runs):
    """Returns for each of `runs`, a name and (ranks, arguments), its steps over those of one rank
    before and after it; and all steps of one rank."""
    ratios, ones = {name: [] for name in runs}, [host.one_rank()]
    for _ in range(rounds):
        for name, run in runs.items():
            step = host.step(*run)
            ones.append(host.one_rank())
            ratios[name].append(2 * step / (ones[-2] + ones[-1]))
    return ratios, ones


def calibrated(host, rounds):
    """Returns the rates of a rank by which a step takes the measured times; each fits exactly."""
    runs = {
        "part": (1, ["--batch-size", str(BATCH // 4)]),
        "passes": (1, Mesh("", microbatches=MANY).arguments()),
        "cut": (2, Mesh("", tp=2).arguments()),
        "cut passes": (2, Mesh("", tp=2, microbatches=MANY).arguments()),
    }
    ratios, ones = ratios_to_one_rank(host, rounds, runs)
    whole = statistics.median(ones)
    part, passes, cut, cut_passes = (whole * statistics.median(ratios[name]) for name in runs)
    operations = host.plans(1, BATCH, 1, {"gflops": 1})["operations"]
    seconds = (whole - part) / 0.75  # of the operations of BATCH samples
    beside = max(0.0, (passes - whole) / (MANY - 1))
    update = max(0.0, whole - seconds - beside)
    gigabytes, latency = host.link()
    of_sums = (cut_passes - cut) / (MANY - 1) - beside  # of a pass; each has two messages' latency
    sums = max(0.0, of_sums / (4 * LAYERS + 2) - 2e-6 * latency)
    return {
        "gflops": operations / seconds / 1e9, "layer-us": 1e6 * beside / LAYERS,
        "sum-us": 1e6 * sums, "update-ns": 1e9 * update / host.parameters, "link": gigabytes,
        "link-us": latency, "cores": os.cpu_count(), "overlap": 0,
    }


def predicted(host, mesh, rates):
    plans = host.plans(mesh.ranks, BATCH, mesh.microbatches, rates)["plans"]
    return next(plan["seconds"]["total"] for plan in plans if mesh.is_plan(plan))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="the folder of ddprun, ddp_plan, transformer, costs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="meshes whose names match this expression")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write((ROOT / "docs/wrapper.md").read_text()[:8000])
        text.flush()
        host = Host(arguments.bin, text.name)
        host.learn_model()
        rates = calibrated(host, arguments.rounds)
        print("rates: " + " ".join(f"--{k} {v:.4g}" for k, v in rates.items()), flush=True)
        one = predicted(host, Mesh("one rank"), rates)
        meshes = [mesh for mesh in MESHES if re.search(arguments.only, mesh.name)]
        runs = {mesh.name: (mesh.ranks, mesh.arguments()) for mesh in meshes}
        ratios, _ = ratios_to_one_rank(host, arguments.rounds, runs)
        print("| mesh | predicted, of one rank's step | measured, median | least and most | "
              "predicted / measured |\n|---|---|---|---|---|")
        for mesh in meshes:
            of_mesh = ratios[mesh.name]
            forecast, measured = predicted(host, mesh, rates) / one, statistics.median(of_mesh)
            print(f"| {mesh.name} | {forecast:.2f} | {measured:.2f} | {min(of_mesh):.2f} to "
                  f"{max(of_mesh):.2f} | {forecast / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
