"""The coordinator of a job among strangers, and after stops, broken connections and full disks.

usage: coordinator_test.py DDPRUN ELASTIC_PROBE
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from free_port import free_port  # noqa: E402

DDPRUN, PROBE = map(os.path.abspath, sys.argv[1:3])
del sys.argv[1:3]
WITH_40_DESCRIPTORS = ["bash", "-c", 'ulimit -n 40; exec "$@"', "-"]
PATIENCE = 90  # s; only failing tests wait that long
FOR_LONG = ["100000", "5"]  # steps, and milliseconds a step


class Job:
    """A ddprun, and what it prints."""

    def __init__(self, *words, before=()):
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*before, DDPRUN, *words], stdout=self.output, stderr=subprocess.STDOUT)

    def text(self):
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    def wait_for(self, pattern, count=1):
        wait_until(lambda: len(re.findall(pattern, self.text())) >= count or self.process.poll() is not None)
        if len(re.findall(pattern, self.text())) < count:
            raise AssertionError(f'expected {count} times "{pattern}" in: {self.text()}')

    def end(self, send=None):
        if send is not None:
            self.process.send_signal(send)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs: {self.text()}") from None

    def supervisor(self):
        """The process that coordinates."""
        wait_until(lambda: children(self.process.pid))
        return children(self.process.pid)[0]

    def ranks(self):
        return children(self.supervisor())

    def port(self):
        environment = pathlib.Path(f"/proc/{self.ranks()[0]}/environ").read_text()
        return int(re.search(r"DDP_COORDINATOR=[^/]*:(\d+)/", environment)[1])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.output.close()


def wait_until(holds):
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("what the test waits for does not come")
        time.sleep(0.01)


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sockets_of(pid):
    found = set()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return found


def connections(pid, state):
    """The local and remote addresses of a process's TCP sockets in a state of /proc/net/tcp."""
    own = sockets_of(pid)
    lines = [line.split() for name in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {(line[1], line[2]) for line in lines if line[3] == state and f"socket:[{line[9]}]" in own}


def has_ended(connection):
    try:
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def can_mount():
    return os.geteuid() == 0 and subprocess.run(
        ["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode == 0


class Coordinator(unittest.TestCase):
    def start(self, *words, **kwargs):
        job = Job(*words, **kwargs)
        self.addCleanup(job.close)
        return job

    def elastic(self, *options, steps=FOR_LONG, ranks=2, **kwargs):
        job = self.start("-n", str(ranks), "--elastic", *options, PROBE, *steps, **kwargs)
        job.wait_for("ddprun: generation 1: ")
        return job

    def stranger(self, port):
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.addCleanup(connection.close)
        connection.setblocking(False)
        return connection

    def expect_undisturbed(self, job):
        """Until its end, no process was lost, and no second generation made."""
        self.assertEqual(job.end(signal.SIGTERM), 128 + signal.SIGTERM, job.text())
        self.assertNotRegex(job.text(), "starting another one|silent|generation 2|closed its connection")

    def test_strangers_take_all_descriptors(self):
        job = self.elastic("--min-ranks", "1", before=WITH_40_DESCRIPTORS)
        ranks = job.ranks()
        for _ in range(120):
            self.stranger(job.port())
        os.kill(ranks[1], signal.SIGKILL)
        job.wait_for("; joined: 1")
        self.assertIn(ranks[0], job.ranks())
        self.assertEqual(job.end(signal.SIGTERM), 128 + signal.SIGTERM, job.text())

    def test_more_strangers_than_are_kept(self):
        """The oldest make room; a process that speaks comes in."""
        job = self.elastic("--min-ranks", "1")
        strangers = [self.stranger(job.port()) for _ in range(200)]
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.wait_for("; joined: 1")
        wait_until(lambda: all(has_ended(one) for one in strangers[:100]))
        self.assertEqual(job.end(signal.SIGTERM), 128 + signal.SIGTERM, job.text())

    def test_slow_talker(self):
        """It gets no more time for each byte, and the hosts do not wait for it."""
        port = free_port()
        line = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "1"]
        first = self.start("-n", "1", *line, "--node-rank", "0", "true")
        wait_until(lambda: connections(first.supervisor(), "0A"))
        talker = self.stranger(port)
        over = threading.Event()

        def talk():
            with contextlib.suppress(OSError):
                while not over.wait(0.2):
                    talker.send(b"h")
        thread = threading.Thread(target=talk)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(over.set)
        wait_until(lambda: has_ended(talker))  # node 0 waits for the other host all that time
        second = self.start("-n", "1", *line, "--node-rank", "1", "true")
        self.assertEqual([job.end() for job in (first, second)], [0, 0], first.text() + second.text())

    def test_one_host_listens_to_itself(self):
        job = self.elastic()
        addresses = {local.split(":")[0] for local, _ in connections(job.supervisor(), "0A")}
        self.assertEqual(addresses, {"0100007F"})
        self.expect_undisturbed(job)

    def test_coordinator_is_stopped(self):
        """For longer than --lost-after: all ranks give up their connections, and come back."""
        job = self.elastic("--lost-after", "2")
        ranks = job.ranks()
        before = {rank: connections(rank, "01") for rank in ranks}
        self.assertTrue(all(before.values()))
        supervisor = job.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        try:
            wait_until(lambda: all(connections(rank, "01") - before[rank] for rank in ranks))
        finally:
            os.kill(supervisor, signal.SIGCONT)
        # It has accepted them once both have one and the same connections.
        wait_until(lambda: all(
            (theirs, own) in connections(supervisor, "01") for rank in ranks for own, theirs in connections(rank, "01")))
        self.assertEqual(job.ranks(), ranks)
        self.expect_undisturbed(job)

    def test_connection_is_reset(self):
        job = self.elastic()
        rank = job.ranks()[1]
        (own, _), = before = connections(rank, "01")
        killed = subprocess.run(
            ["ss", "-K", "-t", f"sport = :{int(own.split(':')[1], 16)}"], capture_output=True, text=True)
        if killed.returncode != 0 or connections(rank, "01") == before:
            self.skipTest("ss -K does nothing here")
        wait_until(lambda: connections(rank, "01") - before)
        self.expect_undisturbed(job)

    @unittest.skipUnless(can_mount(), "needs root, and namespaces")
    def test_state_on_a_full_disk(self):
        """ddprun says so, and the job goes on; with room again the file is written."""
        with tempfile.TemporaryDirectory() as folder:
            script = (f"mount -t tmpfs -o size=64k none {folder}; "
                      f'cat /dev/zero >{folder}/rest 2>/dev/null || true; exec "$@"')
            port = free_port()
            coordinator = self.start(
                "--coordinate", str(port), "--max-ranks", "2", "--token", "t", "--state", f"{folder}/state",
                before=["unshare", "--mount", "bash", "-ec", script, "-"])
            coordinator.wait_for("DDP_COORDINATOR=")
            job = self.start(
                "-n", "2", "--elastic", "--coordinator", f"127.0.0.1:{port}/t", PROBE, *FOR_LONG)
            job.wait_for("ddprun: generation 1: ")
            coordinator.wait_for(
                f"--state: expected to write {folder}/state, got: No space left on device. The job goes on")
            inside = pathlib.Path(f"/proc/{coordinator.process.pid}/root{folder}")
            inside.joinpath("rest").unlink()
            os.kill(job.ranks()[1], signal.SIGKILL)
            job.wait_for("ddprun: generation 2: ")
            self.assertRegex(inside.joinpath("state").read_text(), r"^ddprun-coordinator 2 2 1 2 ")
            self.assertEqual(coordinator.text().count("--state"), 1, coordinator.text())


if __name__ == "__main__":
    unittest.main()
