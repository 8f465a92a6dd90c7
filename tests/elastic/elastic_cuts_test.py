"""Cuts the link between two hosts, network namespaces, on which ranks train: no two groups train at the
same time, and the ranks that were cut off come back as new processes.

usage: elastic_cuts_test.py DDPRUN ELASTIC_WORLD [--all]

By default one cut, which is longer than --lost-after; with --all also one that is shorter, in which
nothing may happen. Exit code 77: skipped, no network namespace can be made.
"""

import collections
import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

PATIENCE = 60  # seconds
DDPRUN, WORLD = map(os.path.abspath, sys.argv[1:3])
SPACES = [f"ddp_cuts_{os.getpid()}_{side}" for side in (0, 1)]
ADDRESSES = ["10.214.0.1", "10.214.0.2"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def make_link():
    try:
        for space in SPACES:
            ip("netns", "add", space)
    except (OSError, subprocess.CalledProcessError):
        print("skipped: no network namespaces here")
        sys.exit(77)
    ip("link", "add", "link0", "netns", SPACES[0], "type", "veth", "peer", "name", "link1", "netns", SPACES[1])
    for side in (0, 1):
        ip("-n", SPACES[side], "address", "add", f"{ADDRESSES[side]}/24", "dev", f"link{side}")
        ip("-n", SPACES[side], "link", "set", "lo", "up")
        ip("-n", SPACES[side], "link", "set", f"link{side}", "up")


def cut_link():
    """Drops all packets, so that each side still reaches itself."""
    for side in (0, 1):
        subprocess.run(["tc", "-n", SPACES[side], "qdisc", "replace", "dev", f"link{side}", "root",
                        "pfifo", "limit", "0"], check=True)


def mend_link():
    for side in (0, 1):
        subprocess.run(["tc", "-n", SPACES[side], "qdisc", "del", "dev", f"link{side}", "root"],
                       check=False, capture_output=True)


class Host:
    """A ddprun with two ranks in a namespace."""

    def __init__(self, side, folder, steps, lost_after):
        command = ["ip", "netns", "exec", SPACES[side], DDPRUN, "-n", "2", "--nnodes", "2",
                   "--node-rank", str(side), "--rdzv-endpoint", f"{ADDRESSES[0]}:29611", "--elastic",
                   "--min-ranks", "2", "--max-restarts", "50", "--lost-after", str(lost_after), "--wait", "60",
                   "--", WORLD, str(steps), "20", folder, "gloo,slow"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"link{side}"}
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

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


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


def run(steps, lost_after, cut):
    """Cuts the link for some seconds, in the midst of a training."""
    with tempfile.TemporaryDirectory(prefix="ddp-test-cuts-") as folder:
        hosts = [Host(side, folder, steps, lost_after) for side in (0, 1)]
        try:
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
        finally:
            mend_link()
            for host in hosts:
                host.close()


def main():
    make_link()
    try:
        run(steps=500, lost_after=2, cut=4)
        if "--all" in sys.argv:
            run(steps=300, lost_after=10, cut=2)
            run(steps=1000, lost_after=10, cut=12)
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


main()
