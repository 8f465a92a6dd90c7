#!/usr/bin/env python3
"""Times init_process_group with a first barrier, and wrapping a model, beside Python's, on this host.

    benchmarks/init_time.py [--ranks 2,8,32,64] [--runs 3] [--bin build/release/bin] [--json]

All ranks are started and have loaded LibTorch before the clock starts; the time of a run is that
of its slowest rank, and the table, in Markdown, has the median of the runs. The last columns need
a Python with torch (scripts/python_with_torch.sh) and are empty without one, or where the host has
no memory for so many. With --json, a line of JSON for each kind and number of ranks.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER_MEMORY_MB = 290  # of one more Python process with torch for CUDA, beyond what they share


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def available_memory_mb():
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) // 1024 * 3 // 4  # the rest is for others


class World:
    """One process for each rank, which waits for lines on standard input."""

    def __init__(self, commands):
        self.ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            )
            for command, variables in commands
        ]
        self._expect_ready()

    def time_setup(self, backend):
        """Seconds to make the group, and to wrap a model, each the slowest rank's."""
        self._tell(f"{backend} {free_port()}")
        times = [[float(word) for word in line.split()] for line in self._hear()]
        self._tell("done")
        self._expect_ready()
        return [max(of_part) for of_part in zip(*times)]

    def close(self):
        for rank in self.ranks:
            rank.stdin.close()
        if any([rank.wait() for rank in self.ranks]):
            sys.exit("init_time: a rank failed")

    def _tell(self, line):
        for rank in self.ranks:
            print(line, file=rank.stdin, flush=True)

    def _hear(self):
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            for rank in self.ranks:
                rank.kill()
            sys.exit("init_time: a rank has ended")
        return lines

    def _expect_ready(self):
        assert all(line == "ready\n" for line in self._hear())


def ddp_world(bin_folder, size):
    program = str(bin_folder / "costs")
    return World(
        ([program, "init_time"], {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    )


def python_world(python, size):
    peer = str(ROOT / "benchmarks" / "peers" / "init_peer.py")
    return World(([python, "-W", "ignore", peer, str(rank), str(size)], {}) for rank in range(size))


def medians(world, backend, runs):
    """Medians over a world's runs: seconds for the group and for wrapping."""
    return [statistics.median(part) for part in zip(*(world.time_setup(backend) for _ in range(runs)))]


def measure(arguments, python, size):
    """Yields the kind, and its medians, or None where the host has no memory for it."""
    world = ddp_world(arguments.bin, size)
    for backend, kind in (("gloo", "ddp, gloo"), ("default", "ddp, default")):
        yield kind, medians(world, backend, arguments.runs)
    world.close()
    if python is None or available_memory_mb() < size * PEER_MEMORY_MB:
        yield "Python, gloo", None
        return
    world = python_world(python, size)
    yield "Python, gloo", medians(world, "gloo", arguments.runs)
    world.close()


def print_row(size, measured):
    cells = [str(size)]
    for _, times in measured:
        cells += [f"{seconds:.3f}" for seconds in times] if times else ["", ""]
    print("| " + " | ".join(cells) + " |", flush=True)


def print_lines(size, measured):
    for kind, times in measured:
        if times:
            init_s, wrap_s = times
            record = {"kind": kind, "ranks": size, "init_s": init_s, "wrap_s": wrap_s}
            print(json.dumps(record), flush=True)


def find_python(bin_folder):
    script = ROOT / "scripts" / "python_with_torch.sh"
    with open(bin_folder.parent / "CMakeCache.txt") as cache:
        torch_dir = next((line for line in cache if line.startswith("Torch_DIR:")), "=")
    environment = os.environ | {"Torch_DIR": torch_dir.split("=", 1)[1].strip()}
    found = subprocess.run([script], env=environment, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,8,32,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument("--json", action="store_true", help="lines instead of a table")
    parser.add_argument(
        "--python", help='with torch, "" for none; default: of the LibTorch that was built with'
    )
    arguments = parser.parse_args()
    python = arguments.python if arguments.python is not None else find_python(arguments.bin)
    if not arguments.json:
        print("| ranks | ddp, gloo (s) | wrap | ddp, default (s) | wrap | Python, gloo (s) | wrap |")
        print("|" + "---|" * 7)
    for size in map(int, arguments.ranks.split(",")):
        measured = measure(arguments, python or None, size)
        (print_lines if arguments.json else print_row)(size, measured)


main()
