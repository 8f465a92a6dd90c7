"""Kills a rank of a training under `ddprun --elastic`, and another one while the rest recovers.

usage: double_failures.py FOLDER [--runs N] [--seed N] [--kind WORDS] [--example] [--keep FOLDER]

FOLDER has ddprun and elastic_training_world, which scripts/build.sh makes; --example trains its elastic. Each run
trains 4 ranks with --min-ranks 1. The second kill comes at a drawn moment between the first one and the second step
after it. A run fails where ddprun does not end with 0, where a process ends that was not killed here, and where the
ranks that finish have other states. The output of each failed run is kept.

On a busy machine a kill may come when the ranks are done. Where the killed one has not ended by then, ddprun has to
say so, and its exit code is that of the rank, 137.
"""

import argparse
import contextlib
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

RANKS, STEPS, MILLISECONDS = 4, 240, 4
PATIENCE = 120  # s; a job that takes longer hangs
KILLED_LATE = r"\(pid \d+\) was killed by signal 9 \(SIGKILL\); the job is done, so no other one is started"


class Rank:
    """Kills this process, and none that has its number later."""

    def __init__(self, pid):
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):  # it has finished
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def close(self):
        os.close(self.descriptor)


class Job:
    """A training, the processes that it has, and what it prints."""

    def __init__(self, programs, kind, folder, is_example):
        self.folder = pathlib.Path(folder)
        self.is_example = is_example
        program = [f"{programs}/elastic_training_world", str(STEPS), str(MILLISECONDS), folder, kind]
        if is_example:
            program = [f"{programs}/elastic", str(MILLISECONDS)]
        command = [f"{programs}/ddprun", "-n", str(RANKS), "--elastic", "--min-ranks", "1", "--max-restarts", "50",
                   "--", *program]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder)
        self.output = ""
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        self.is_late = False
        self.limit = threading.Timer(PATIENCE, self.stop)
        self.limit.start()

    def stop(self):
        self.is_late = True
        self.process.kill()

    def read(self):
        for line in self.process.stdout:
            with self.changed:
                self.output += line
                self.changed.notify_all()
        with self.changed:
            self.process.wait()
            self.changed.notify_all()

    def wait_for(self, text, count=1):
        """Returns whether the output has it; False where the job has ended before."""
        def is_there():
            return self.output.count(text) >= count or self.process.returncode is not None
        with self.changed:
            self.changed.wait_for(is_there)
            return self.output.count(text) >= count

    def ranks(self):
        """The process of each slot; fewer where some have ended."""
        found = {}
        with contextlib.suppress(OSError, IndexError):
            for pid in children(children(self.process.pid)[0]):
                with contextlib.suppress(OSError, TypeError):
                    environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                    found[int(re.search(rb"\0DDP_SLOT=(\d+)", environment)[1])] = Rank(pid)
        return found

    def wait_until_all_train(self):
        if self.is_example:
            return self.wait_for("ddprun: generation 1: ")
        return self.wait_for("reached step 20", RANKS)

    def steps(self, pid):
        logs = list(self.folder.glob(f"steps.*.{pid}"))
        return logs[0].read_bytes().count(b"\n") if logs else 0

    def end(self):
        self.reader.join()
        self.limit.cancel()
        self.process.stdout.close()
        return self.process.returncode


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_moment(job, moment, survivor, draw):
    """Waits from the first kill until the moment of the second one."""
    if moment == "at once":
        time.sleep(draw.uniform(0, 0.02))
    elif moment == "soon":
        time.sleep(draw.uniform(0, 0.3))
    elif moment == "while they meet":
        time.sleep(draw.uniform(0.02, 0.12))
    elif moment == "in the next generation" or job.is_example:
        job.wait_for("generation 2")
        time.sleep(draw.uniform(0, 0.03))
    else:
        before = job.steps(survivor)
        job.wait_for("generation 2")
        while job.steps(survivor) < before + (1 if moment == "after a step" else 2):
            if job.process.returncode is not None:
                return
            time.sleep(0.001)


def faults_of(job, code, killed, has_trained):
    expected = 128 + signal.SIGKILL if re.search(KILLED_LATE, job.output) else 0
    faults = [] if code == expected else [f"ddprun ended with {code}"]
    if job.is_late:
        faults = [f"the job was not done after {PATIENCE} s"]
    faults += [] if has_trained else ["the job ended before it trained"]
    for rank, pid, how in re.findall(r"ddprun: rank (\d+) \(pid (\d+)\) ([^;\n]*)", job.output):
        if int(pid) not in killed:
            faults.append(f"rank {rank} {how}")
    hashes = re.findall(r"the end at step \d+, hash (\w+), loss_sum", job.output)
    if not job.is_example and (len(hashes) == 0 or len(set(hashes)) > 1):
        faults.append(f"the ranks ended with the states {hashes}")
    faults += [f"left {core.name}" for core in job.folder.glob("core*")]
    return faults


def run_once(given, draw):
    moment = draw.choice(
        ["at once", "soon", "while they meet", "in the next generation", "after a step", "after two steps"])
    first, second, third = draw.sample(range(RANKS), 3)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(os.path.abspath(given.programs), given.kind, folder, given.example)
        killed = set()
        has_trained = job.wait_until_all_train()
        time.sleep(draw.uniform(0, 0.2))
        ranks = job.ranks() if has_trained else {}
        if len(ranks) == RANKS:
            ranks[first].kill()
            wait_for_moment(job, moment, ranks[third].pid, draw)
            ranks[second].kill()
            killed = {ranks[first].pid, ranks[second].pid}
        for rank in ranks.values():
            rank.close()
        faults = faults_of(job, job.end(), killed, has_trained)
        title = f"killed rank {first}, and then rank {second} {moment}"
        is_late = not killed or re.search(KILLED_LATE, job.output) is not None
        return faults, is_late, f"{title}: {'; '.join(faults)}\n{job.output}"


def main():
    options = argparse.ArgumentParser(usage=__doc__)
    options.add_argument("programs")
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--kind", default="shm")
    options.add_argument("--example", action="store_true")
    options.add_argument("--keep", default="double_failures")
    given = options.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    failed = late = 0
    for seed in range(given.seed, given.seed + given.runs):
        faults, is_late, report = run_once(given, random.Random(seed))
        late += is_late
        if not faults:
            continue
        failed += 1
        pathlib.Path(given.keep).mkdir(parents=True, exist_ok=True)
        kept = pathlib.Path(given.keep, f"{seed}.log")
        kept.write_text(report)
        print(f"run {seed} failed, see {kept}: {'; '.join(faults)}", flush=True)
    print(f"{failed} of {given.runs} runs failed, in {late} the ranks were done before a kill; "
          f"load {os.getloadavg()[0]:.0f}")
    sys.exit(1 if failed else 0)


main()
