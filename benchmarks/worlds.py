#!/usr/bin/env python3
"""How what a rank does grows with the number of ranks: python3 benchmarks/worlds.py build/release/bin

Runs `costs worlds` as one pretended rank of 64, 256, 1,024 and 4,096, and writes benchmarks/WORLDS.md.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess

SIZES = (64, 256, 1024, 4096)
PAGE = pathlib.Path(__file__).parent / "WORLDS.md"
MEBIBYTE = 1 << 20

INTRODUCTION = """# What grows with the number of ranks

Of `python3 benchmarks/worlds.py build/release/bin`, which writes this page; [README.md](README.md) names the other
benchmarks. One process is rank 7 of the world, [pretended](../docs/pretend.md): its collectives are answered at once.
So a time is what one rank computes, and the memory what its tables take. No row may grow faster than the number
of ranks.

Machine: {machine}. Times are those of the thread's processor,
with memory that the process has already: the fastest tenth of the repetitions, in the fastest of {passes} processes,
beside other work.

`grows` is log4 of the ratio of the last two columns: 1 is linear, 2 quadratic, 0 constant. Where it is a little above
1, the tables no longer fit into a cache.
"""

STORE = """
## The store at the start

Ranks as threads over one store, so these are counts, of all ranks together. The host of the store is rank 0.

- The startup barrier is one round to arrive and one to confirm, whatever the number: 15 operations a rank, and while a
  rank waits one each max(20, ranks / 2) ms, so that all together ask 2,000 times a second at most.
- The monitor's addresses are one key a rank. Rank 0 reads them and writes them as one value, which each rank reads.
"""

CHANGES = """
## An elastic job of 1,024

`launch_membership_test` ("a change of 1,024 members") runs the coordinator's and the members' state machines over
simulated links of 0.5 ms and 1 Gbit/s at the coordinator, who takes 10 us a line:

| | a member is lost | a process enters | the coordinator sends |
|---|---|---|---|
| 1,024 members | {loss} ms | {entry} ms | {bytes} kB in both |

Members that have the generation before get what has changed, some 50 bytes; before, they got all members, 40 MB in a
change. Messages that wait for each other are as many at 16 members as at 1,024, but for the log2(n) of the ranks that
meet. What stays: in the first generation each member learns all, 27 MB at 1,024; and the coordinator looks at all
connections whenever any has a line, which is linear each time.
"""

MENDED = """
## Mended by this table

Times before are of a clock, with the pages that the kernel cleared.

| | ranks | before | after |
|---|---|---|---|
| a change of members, at the coordinator: counts of members were walks over all; cubic where each line woke it | 1,024 | 362 ms, 7,063 where each line wakes it | {change} |
| `new_group`: each rank got every rank's list of members | 4,096 | 245 ms, 182 MiB | {group} |
| the same for each `FullyShardedDataParallel` | 4,096 | 602 ms, 182 MiB | {sharded} |
| a checkpoint's index, tensors cut by columns: each box was compared with each | 4,096 | 4,298 ms | {columns} |
| `ddp_consolidate`, 8 tensors: beyond 256 files each was parsed again for each tensor | 4,096 | 6,631 ms | {whole} |
"""


def measured(binary, size):
    variables = dict(
        os.environ, RANK="7", WORLD_SIZE=str(size), LOCAL_RANK="7", LOCAL_WORLD_SIZE="8", DDP_PRETEND="7"
    )
    output = subprocess.run([binary, "worlds"], env=variables, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def milliseconds(us):
    value = us / 1000
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def growth(row, key):
    small, large = (row[size][key] for size in SIZES[-2:])
    return math.log(large / small, 4) if small > 0 and large > 0 else 0.0


def table_of_rows(rows):
    lines = ["| ms | " + " | ".join(f"{size:,}" for size in SIZES) + " | grows | MiB at 4,096 |", "|---" * 7 + "|"]
    for what, row in rows.items():
        times = " | ".join(milliseconds(row[size]["us_p10"]) for size in SIZES)
        memory = f"{row[SIZES[-1]]['bytes'] / MEBIBYTE:.1f}"
        lines.append(f"| {what} | {times} | {growth(row, 'us_p10'):.2f} | {memory} |")
    return "\n".join(lines) + "\n"


def table_of_store(rows):
    sizes = [size for size in SIZES if all(size in row for row in rows.values())]
    lines = ["| | " + " | ".join(f"{size:,}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for what, row in rows.items():
        for key, name in (("operations", "operations"), ("keys", "keys that are read")):
            lines.append(f"| {what}: {name} | " + " | ".join(f"{row[size][key]:,}" for size in sizes) + " |")
    return "\n".join(lines) + "\n"


def keep_fastest(rows, line):
    row = rows.setdefault(line["what"], {})
    known = row.get(line["ranks"])
    if known is None or line.get("us_p10", 0) < known.get("us_p10", 0):
        row[line["ranks"]] = line


def of_row(row, size, with_memory=True):
    memory = f", {row[size]['bytes'] / MEBIBYTE:.0f} MiB" if with_memory else ""
    return f"{milliseconds(row[size]['us_p10'])} ms{memory}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin", help="the folder with costs")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--change", nargs=3, default=("?", "?", "?"), help="ms, ms and kB that the test prints with -s")
    arguments = parser.parse_args()
    rows, store = {}, {}
    for _ in range(arguments.passes):
        for size in SIZES:
            for line in measured(os.path.join(arguments.bin, "costs"), size):
                keep_fastest(rows if "us" in line else store, line)
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Linux {platform.release()}"
    loss, entry, sent = arguments.change
    page = INTRODUCTION.format(machine=machine, passes=arguments.passes) + "\n" + table_of_rows(rows)
    page += STORE + "\n" + table_of_store(store) + CHANGES.format(loss=loss, entry=entry, bytes=sent)
    page += MENDED.format(
        change=of_row(rows["a change of members, at the coordinator"], 1024, with_memory=False),
        group=of_row(rows["new_group of all ranks"], 4096),
        sharded=of_row(rows["FullyShardedDataParallel, 8 units"], 4096),
        columns=of_row(rows["a checkpoint's index, tensors cut by columns"], 4096, with_memory=False),
        whole=of_row(rows["ddp_consolidate"], 4096, with_memory=False),
    )
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
