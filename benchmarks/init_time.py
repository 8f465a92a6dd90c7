#!/usr/bin/env python3
"""Times init_process_group and a first barrier, beside Python's, on this host.

    benchmarks/init_time.py [--ranks 2,8,32,64] [--runs 3] [--build build/release]

All ranks are started and have loaded LibTorch before the clock starts; the time of a run is that
of its slowest rank, and the table, in Markdown, has the median of the runs. The last column needs
a Python with torch (scripts/python_with_torch.sh) and is empty without one, or where the host has
no memory for so many.
"""

import argparse
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
    """Ranks that wait, as processes, for what to do."""

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

    def time_init(self, backend):
        self._tell(f"{backend} {free_port()}")
        seconds = max(float(line) for line in self._hear())
        self._tell("done")
        self._expect_ready()
        return seconds

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


def ddp_world(build, size):
    program = str(build / "bin" / "init_time")
    return World(
        ([program], {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    )


def python_world(python, size):
    peer = str(ROOT / "benchmarks" / "peers" / "init_peer.py")
    return World(([python, "-W", "ignore", peer, str(rank), str(size)], {}) for rank in range(size))


def median(world, backend, runs):
    return f"{statistics.median(world.time_init(backend) for _ in range(runs)):.3f}"


def row(arguments, python, size):
    cells = [str(size)]
    world = ddp_world(arguments.build, size)
    for backend in ("gloo", "default"):
        cells.append(median(world, backend, arguments.runs))
    world.close()
    if python is None or available_memory_mb() < size * PEER_MEMORY_MB:
        return [*cells, ""]
    world = python_world(python, size)
    cells.append(median(world, "gloo", arguments.runs))
    world.close()
    return cells


def find_python(build):
    script = ROOT / "scripts" / "python_with_torch.sh"
    with open(build / "CMakeCache.txt") as cache:
        torch_dir = next((line for line in cache if line.startswith("Torch_DIR:")), "=")
    environment = os.environ | {"Torch_DIR": torch_dir.split("=", 1)[1].strip()}
    found = subprocess.run([script], env=environment, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,8,32,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--python", help="with torch; default: of the LibTorch that was built with")
    arguments = parser.parse_args()
    python = arguments.python or find_python(arguments.build)
    print("| ranks | ddp, gloo (s) | ddp, default (s) | Python, gloo (s) |")
    print("|---|---|---|---|")
    for size in arguments.ranks.split(","):
        print("| " + " | ".join(row(arguments, python, int(size))) + " |", flush=True)


main()
