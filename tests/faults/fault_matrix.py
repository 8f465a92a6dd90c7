#!/usr/bin/env python3
"""Runs cases of the fault matrix, judges them, stores the results, and writes the report.

A world of 3 ranks trains; in one phase, one rank has a fault. See docs/faults.md.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from cases import Case, all_cases, drawn_by, part_of  # noqa: E402
from judge import misses  # noqa: E402
from report import write_table  # noqa: E402
from world import Programs, Run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def commit():
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True,
                            text=True, check=False)
    return answer.stdout.strip() or "no commit"


def entries_of(folder):
    """Lists the names in a folder of all processes that a library or a launcher may have made."""
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    return {f"{folder}/{n}" for n in names if re.match(r"(ddp-(?!fault-|test-)|torch(?!elastic)|gloo|pymp|sem\.)", n)}


def run_case(case, programs, slack):
    observed = Run(case, programs).observe(slack)
    record = dataclasses.asdict(case)
    record["misses"] = misses(case, observed, slack)
    record["learned"] = observed.learned
    record["left"] = observed.left
    record["ended_after"] = round(observed.ended_after, 2)
    record["skipped"] = 77 in [c for c in observed.codes if c] or "skipped: " in observed.output
    record["output"] = observed.output if record["misses"] else ""
    return record


def run_cases(cases, programs, jobs, results, slack):
    lock = threading.Lock()
    done = []
    with open(results, "a") as file, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        def run_one(case):
            record = run_case(case, programs, slack)
            with lock:
                done.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record["misses"] and not record["skipped"]:
                    print(f"MISS {case.name()}: " + "; ".join(record["misses"]), flush=True)
        list(pool.map(run_one, cases))
    return done


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="the folder of fault_world and ddprun")
    parser.add_argument("--torchrun", default="", help="its path; empty: those cases are left out")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time. Default: 4")
    parser.add_argument("--slack", type=float, default=0,
                        help="seconds that each bound gets beyond docs/faults.md, for a machine "
                        "with other work. Default: 0")
    parser.add_argument("--only", default="", help="cases whose names match this expression")
    parser.add_argument("--results", help="a file that keeps results of several parts")
    parser.add_argument("--table", help="the page that takes the table of all results")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", default="1/1", metavar="N/M", help="the N-th of M parts")
    which.add_argument("--draw", type=int, metavar="M", help="one of M parts, drawn by HEAD")
    return parser.parse_args()


def runs(torchrun):
    """Whether torchrun runs with all that it needs: the CPU wheel alone lacks packages."""
    if not os.access(torchrun, os.X_OK):
        return False
    return subprocess.run([torchrun, "--help"], capture_output=True, check=False).returncode == 0


def chosen_cases(arguments):
    cases = all_cases()
    if arguments.draw:
        number = drawn_by(commit(), arguments.draw)
        print(f"part {number} of {arguments.draw}, drawn by {commit()}")
        cases = part_of(cases, number, arguments.draw)
    else:
        number, parts = (int(n) for n in arguments.part.split("/"))
        cases = part_of(cases, number, parts)
    if not runs(arguments.torchrun):
        print("no torchrun that runs: its cases are left out")
        cases = [c for c in cases if c.launcher != "torchrun"]
    return [c for c in cases if re.search(arguments.only, c.name())]


def main():
    arguments = parse_arguments()
    binaries = pathlib.Path(arguments.bin).resolve()
    programs = Programs(str(binaries / "fault_world"), str(binaries / "ddprun"), arguments.torchrun)
    cases = chosen_cases(arguments)
    shared = ("/dev/shm", "/tmp")
    before = set().union(*map(entries_of, shared))
    begin = time.monotonic()
    done = run_cases(cases, programs, arguments.jobs, arguments.results or os.devnull,
                     arguments.slack)
    bad = [r for r in done if r["misses"] and not r["skipped"]]
    skipped = sum(r["skipped"] for r in done)
    print(f"{len(done)} cases in {time.monotonic() - begin:.0f} s: {len(bad)} with misses, "
          f"{skipped} skipped")
    left = sorted(set().union(*map(entries_of, shared)) - before)
    for entry in left:
        print(f"MISS left behind: {entry}")
    if arguments.table:
        write_table(arguments.table, arguments.results)
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
