"""Cuts the link between two made-up hosts on which ranks train: no two groups train at the same time, and
the ranks that were cut off come back as new processes.

usage: elastic_cuts_test.py DDPRUN ELASTIC_WORLD [--all]

By default one cut, which is longer than --lost-after; with --all also one that is shorter, in which
nothing may happen. Exit code 77: skipped, no namespaces here.
"""

import collections
import glob
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from made_up_hosts import Hosts, in_namespaces_of_our_own  # noqa: E402

PATIENCE = 60  # seconds
DDPRUN, WORLD = map(os.path.abspath, sys.argv[1:3])
HOSTS = ["host0", "host1"]


def cut_link():
    """Drops all packets, so that each side still reaches itself."""
    for host in HOSTS:
        Hosts.run("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "0")


def mend_link():
    for host in HOSTS:
        Hosts.run("tc", "-n", host, "qdisc", "del", "dev", "eth0", "root")


class Host:
    """A ddprun with two ranks on a made-up host."""

    def __init__(self, made_up, side, folder, steps, lost_after):
        command = made_up.on(
            HOSTS[side], DDPRUN, "-n", "2", "--nnodes", "2", "--node-rank", side,
            "--rdzv-endpoint", f"{made_up.address(HOSTS[0])}:29611", "--elastic", "--min-ranks", "2",
            "--max-restarts", "50", "--lost-after", lost_after, "--wait", "60",
            "--", WORLD, steps, "20", folder, "gloo,slow")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        self.log = f"{folder}/host{side}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def text(self):
        with open(self.log, errors="replace") as log:
            return log.read()

    def wait_until(self, what, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"waited in vain for {what}:\n{self.text()}")
            time.sleep(0.1)

    def wait_for(self, pattern, times=1):
        self.wait_until(pattern, lambda: len(re.findall(pattern, self.text())) >= times)

    def end(self):
        if self.process.wait(PATIENCE) != 0:
            raise AssertionError(f"exit code {self.process.returncode}:\n{self.text()}")


def steps_of(folder, slots="[0-9]"):
    """The samples that processes have logged, by step."""
    steps = collections.defaultdict(list)
    for name in glob.glob(f"{folder}/steps.{slots}.*"):
        with open(name) as log:
            for line in log.read().splitlines():
                step, *samples = map(int, line.split())
                steps[step] += samples
    return steps


def expect(holds, what, hosts):
    if not holds:
        raise AssertionError(what + "".join(f"\n--- {host.text()}" for host in hosts))


def run(made_up, steps, lost_after, cut):
    """Cuts the link for some seconds, in the midst of a training."""
    folder = made_up.folder / f"steps_{steps}"
    folder.mkdir()
    hosts = [Host(made_up, side, folder, steps, lost_after) for side in (0, 1)]
    hosts[0].wait_for("reached step 20", 2)
    cut_link()
    time.sleep(cut)
    is_long = cut > lost_after
    if is_long:
        hosts[0].wait_for(r"2 ranks \(0, 1\) go on from step")
    at_end = max(steps_of(folder, "[23]"))
    time.sleep(1)
    if is_long:
        hosts[0].wait_until("the other side goes on", lambda: max(steps_of(folder, "[01]")) > at_end + 5)
    else:
        expect(max(steps_of(folder, "[01]")) <= at_end + 5, "the other side went on alone", hosts)
    expect(max(steps_of(folder, "[23]")) == at_end, "the side that was cut off went on", hosts)
    mend_link()
    if is_long:
        hosts[0].wait_for(r"4 ranks \(0, 1, 2, 3\) go on from step")
    for host in hosts:
        host.end()
    text = "".join(host.text() for host in hosts)
    ends = re.findall(rf"the end at step {steps}, hash (\w+)", text)
    expect(len(ends) == 4 and len(set(ends)) == 1, f"expected 4 equal ranks, got {ends}", hosts)
    generations = max(map(int, re.findall(r"generation (\d+)", text)))
    expect((generations > 1) == is_long, f"got {generations} generations", hosts)
    logged = steps_of(folder)
    twice = [step for step, samples in logged.items() if len(samples) != len(set(samples))]
    expect(not twice, f"two groups took steps {twice}", hosts)
    expect(sorted(logged) == list(range(1, steps + 1)), "expected every step once", hosts)
    print(f"a cut of {cut} s, lost after {lost_after} s: {generations} generations, 4 equal ranks")


if __name__ == "__main__":
    in_namespaces_of_our_own()
    both = Hosts(*HOSTS)
    run(both, steps=500, lost_after=2, cut=4)
    if "--all" in sys.argv:
        run(both, steps=300, lost_after=10, cut=2)
        run(both, steps=1000, lost_after=10, cut=12)
