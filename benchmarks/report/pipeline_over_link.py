"""Prints a pipeline's step over a link beside what it could take: the longer of computation with the
schedule's bubble and the messages of one direction; and the least step that the schedule's list
allows, by clocks. pipeline_over_link.py FILE KIB GBIT_A_SECOND PIPELINE_BOUND
"""

import json
import pathlib
import subprocess
import sys

RANKS = 2


def chunks_of(result):
    return 2 if result["schedule"] == "interleaved" else 1


def list_ms(result, message_ms, program):
    """Returns the milliseconds of a step whose messages take that long."""
    actions = chunks_of(result) * result["microbatches"]
    forward_ms = result["ideal_ms"] / (actions + RANKS - 1) / 3
    words = [program, result["schedule"], RANKS, result["microbatches"], forward_ms, message_ms]
    return float(subprocess.run(
        [str(w) for w in words], stdout=subprocess.PIPE, text=True, check=True).stdout)


def main():
    file, kib, gbit, program = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    message_ms = kib * 1024 * 8 / (gbit * 1e6)
    for result in map(json.loads, file.read_text().splitlines()):
        if result["mode"] == "one_rank" or (result["mode"] == "sleeping" and kib == 1024):
            continue
        # Of one rank to the other, forward and backward.
        wire = (2 * chunks_of(result) - 1) * result["microbatches"] * message_ms
        step, computation = result["step_ms"], result["ideal_ms"]
        least = list_ms(result, message_ms, program)
        print(
            f"{result['schedule']}, {result['mode']}, {kib} KiB: step {step:.0f} ms, "
            f"computation {computation:.0f} ms, wire {wire:.0f} ms: "
            f"{step / max(computation, wire):.2f}; its list {least:.0f} ms: {step / least:.2f}",
            flush=True)


if __name__ == "__main__":
    main()
