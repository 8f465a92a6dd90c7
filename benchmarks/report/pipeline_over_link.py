"""Prints a pipeline's step over a link beside what it could take: the longer of computation with the
schedule's bubble and the messages of one direction. pipeline_over_link.py FILE KIB GBIT_A_SECOND
"""

import json
import pathlib
import sys


def wire_ms(result, kib, gbit):
    """Milliseconds of the messages from one of two ranks to the other, forward and backward."""
    chunks = 2 if result["schedule"] == "interleaved" else 1
    messages = (2 * chunks - 1) * result["microbatches"]
    return messages * kib * 1024 * 8 / (gbit * 1e6)


def main():
    file, kib, gbit = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for result in map(json.loads, file.read_text().splitlines()):
        if result["mode"] == "one_rank" or (result["mode"] == "sleeping" and kib == 1024):
            continue
        wire = wire_ms(result, kib, gbit)
        bound = max(result["ideal_ms"], wire)
        print(
            f"{result['schedule']}, {result['mode']}, {kib} KiB: step {result['step_ms']:.0f} ms, "
            f"computation {result['ideal_ms']:.0f} ms, wire {wire:.0f} ms: "
            f"{result['step_ms'] / bound:.2f}", flush=True)


if __name__ == "__main__":
    main()
