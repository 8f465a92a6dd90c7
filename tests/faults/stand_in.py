#!/usr/bin/env python3
"""Replaces fault_world and a launcher of it, and makes the one mistake that DDP_TWIN names.

    stand_in.py PHASE FAULT VICTIM TRANSPORT SECONDS FOLDER      a rank
    stand_in.py -n 3 ... -- PROGRAM ARGUMENTS...                 a launcher
"""

import os
import pathlib
import subprocess
import sys
import time

twin = os.environ.get("DDP_TWIN", "")


def say(line):
    """Writes a line at once: print() may write its end apart, after another process's line."""
    os.write(1, f"{line}\n".encode())


def launch():
    command = sys.argv[sys.argv.index("--") + 1 :]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(r)}) for r in range(3)]
    for rank, process in enumerate(ranks):
        if process.wait() == 3 and twin != "launcher that names nobody":
            say(f"ddprun: rank {rank} (pid {process.pid}) exited with code 3")
    return 0 if twin == "launcher that returns 0" else 3


def run_rank():
    rank, victim = int(os.environ["RANK"]), int(sys.argv[3])
    struck = pathlib.Path(sys.argv[6])
    while rank != victim and not struck.exists():
        time.sleep(0.01)
    now = int(time.monotonic() * 1000)
    if rank == victim:
        if twin == "stray file":
            (pathlib.Path(os.environ["TMPDIR"]) / "stray").touch()
        if twin == "stray process":
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        if twin != "no fault":
            say(f"rank {rank} strikes at {now} ms")
        struck.mkdir()
        return 3
    if twin == "survivor that hangs":
        time.sleep(60)
    if twin == "survivor that sleeps":
        now += 6000
    who = "a peer" if twin == "survivor that names nobody" else f"rank {victim} of 3"
    where = "something" if twin == "survivor that does not say where" else "reducing bucket 0 of 1"
    if twin != "survivor that does not throw":
        say(f"rank {rank} learned at {now + 100} ms: {where} failed: {who} has ended")
    say(f"rank {rank} left at {now + 200} ms")
    return 0 if twin == "survivor that ends with 0" else 1


sys.exit(launch() if "--" in sys.argv else run_rank())
