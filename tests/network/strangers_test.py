"""Ranks in a network with strangers, and in poor environments: they train, or throw one clear error.

usage: strangers_test.py <network_world>
"""

import contextlib
import os
import pathlib
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from free_port import free_port  # noqa: E402

PROGRAM = os.path.abspath(sys.argv.pop(1))
STEPS = 1000
WITH_64_DESCRIPTORS = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-"]
PATIENCE = 60  # s; only failing tests wait that long


class Rank:
    """A process of network_world."""

    def __init__(self, rank, port, *, steps=STEPS, seconds=20, backend="gloo", command=(), cwd=None, **variables):
        environment = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                           RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        environment.update(variables)
        environment = {name: value for name, value in environment.items() if value is not None}
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, PROGRAM, str(steps), str(seconds), backend],
            env=environment, cwd=cwd, stdout=self.output, stderr=subprocess.STDOUT)

    def text(self):
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    def wait_for(self, line):
        end = time.monotonic() + PATIENCE
        while f"{line}\n" not in self.text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f'expected "{line}" in: {self.text()}')
            time.sleep(0.01)

    def end(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs: {self.text()}") from None

    def close(self):
        self.process.kill()
        self.process.wait()
        self.output.close()


def connect(port, patience=PATIENCE):
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def listening_ports(process):
    """The IPv4 ports that a process listens on: of the store, of Gloo, of the monitor."""
    sockets = set()
    for descriptor in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    ports = []
    for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            ports.append(int(fields[1].split(":")[1], 16))
    return ports


def junk():
    """Messages of strangers: random bytes, and TCPStore's messages with wrong lengths."""
    generator = random.Random(0)
    yield from (generator.randbytes(generator.randint(1, 4096)) for _ in range(50))
    greeting = struct.pack("=BI", 0, 0x3C85F7CE)
    yield greeting[:3]
    for kind in range(20):
        for length in (3, 8 << 20, 1 << 31, 1 << 63, (1 << 64) - 1):
            message = struct.pack("=BQ", kind, length) + b"ab"
            yield message
            yield greeting + message


def can_make_namespaces():
    return os.geteuid() == 0 and subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"], stderr=subprocess.DEVNULL).returncode == 0


needs_namespaces = unittest.skipUnless(can_make_namespaces(), "needs root, and namespaces")


def in_namespaces(script):
    """A command that runs another one, with its own network and mounts, after `script`."""
    return ["unshare", "--net", "--mount", "bash", "-ec", f'ip link set lo up; {script}; exec "$@"', "-"]


class Strangers(unittest.TestCase):
    weights = None  # after STEPS steps, of a world without strangers

    def start(self, *args, **kwargs):
        rank = Rank(*args, **kwargs)
        self.addCleanup(rank.close)
        return rank

    def world(self, port, **kwargs):
        return [self.start(rank, port, **kwargs) for rank in range(2)]

    def stranger(self, port, message=b"", patience=PATIENCE):
        connection = connect(port, patience)
        self.addCleanup(connection.close)
        with contextlib.suppress(ConnectionError):  # it may be thrown out at once
            connection.sendall(message)

    def keep_coming(self, port, process):
        for _ in range(400):
            if process.poll() is not None:
                return
            with contextlib.suppress(OSError):
                self.addCleanup(socket.create_connection(("127.0.0.1", port), timeout=1).close)
            time.sleep(0.01)

    def expect_trained(self, ranks):
        if Strangers.weights is None and ranks:
            reference = self.world(free_port())
            Strangers.weights = self.weights_of(reference)
        self.assertEqual(self.weights_of(ranks), Strangers.weights)

    def weights_of(self, ranks):
        found = set()
        for rank in ranks:
            self.assertEqual(rank.end(), 0, rank.text())
            found.add(re.search(r"^weights (\d+),", rank.text(), re.M)[1])
        self.assertEqual(len(found), 1)
        return found.pop()

    def expect_refused(self, ranks, texts, within):
        for rank, text in zip(ranks, texts):
            self.assertEqual(rank.end(), 1, rank.text())
            refusals = re.findall(r"^refused after (\S+) ms: (.*)", rank.text(), re.M)
            self.assertEqual(len(refusals), 1, rank.text())
            self.assertRegex(refusals[0][1], text)
            self.assertLess(float(refusals[0][0]), 1000 * within)

    def test_at_every_port(self):
        """Strangers connect before the ranks have connected, and while they train."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        port = free_port()
        ranks = [self.start(0, port)]
        for message in junk():
            self.stranger(port, message)
        for _ in range(1000):
            self.stranger(port)
        ranks.append(self.start(1, port))
        for rank in ranks:
            rank.wait_for("step 100")
        ports = [port for rank in ranks for port in listening_ports(rank.process)]
        self.assertGreaterEqual(len(ports), 5)  # the store's, and each rank's of Gloo and of the monitor
        for port in ports:
            for message in junk():
                with contextlib.suppress(ConnectionRefusedError):  # the ranks have trained, and ended
                    self.stranger(port, message, patience=0)
        self.expect_trained(ranks)
        peak = int(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        self.assertLess(peak, 2 << 20, "KiB: no rank takes a stranger's word for a length")

    def test_more_than_descriptors(self):
        """Strangers take all connections that rank 0 can have."""
        port = free_port()
        ranks = [self.start(0, port, seconds=6, command=WITH_64_DESCRIPTORS)]
        for _ in range(200):
            self.stranger(port)
        # And those of the files that rank 0 closes after that.
        more = threading.Thread(target=self.keep_coming, args=(port, ranks[0].process))
        more.start()
        self.addCleanup(more.join)
        ranks.append(self.start(1, port, seconds=6))
        self.expect_refused(
            # Where the strangers are very quick, rank 0 cannot reach itself.
            ranks, ["rank 1 did not come|expected rank 0 to listen on port", "expected rank 0 to answer at 127.0.0.1 port .*, but rank 1 of 2"], within=20)

    def test_second_job(self):
        """A second job on the same port is refused, and the first one trains on."""
        port = free_port()
        first = self.world(port, steps=10**6)
        for rank in first:
            rank.wait_for("step 100")
        second = self.world(port, seconds=6)
        self.expect_refused(
            second, [f"expected rank 0 to listen on port {port}, but it cannot.*choose another MASTER_PORT",
                     "expected all 2 ranks within 6000 ms, but rank 0 did not come"], within=15)
        for rank in first:
            trained = max(int(step) for step in re.findall(r"^step (\d+)$", rank.text(), re.M))
            rank.wait_for(f"step {trained + 200}")

    def test_unknown_interface(self):
        """One rank names an unknown interface; the other one gets the same error."""
        port = free_port()
        ranks = [self.start(0, port), self.start(1, port, GLOO_SOCKET_IFNAME="none0")]
        text = r'on rank 1 of 2: GLOO_SOCKET_IFNAME: expected interfaces of this host, got "none0". There are .*lo'
        self.expect_refused(ranks, [text, text], within=20)

    @needs_namespaces
    def test_silent_name_server(self):
        """Resolving a name takes longer than the group's timeout."""
        server = "import socket; s = socket.socket(2, 2); s.bind(('127.0.0.1', 53)); print(flush=True); s.recv(1); s.recv(1)"
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("nameserver 127.0.0.1\noptions timeout:10 attempts:3\n")
            file.flush()
            script = f'mount --bind {file.name} /etc/resolv.conf; read < <(timeout 30 {sys.executable} -c "{server}")'
            rank = self.start(1, free_port(), seconds=2, command=in_namespaces(script), MASTER_ADDR="rank0.example")
            self.expect_refused([rank], ['expected an address for the host "rank0.example", got none on rank 1 of 2'], 15)  # 30 s without a limit

    @needs_namespaces
    @unittest.skipUnless(os.path.exists("/proc/net/if_inet6"), "needs IPv6")
    def test_ipv6_only(self):
        """The ranks connect, train, and name a rank that is killed."""
        space = f"ddp_strangers_{os.getpid()}"
        subprocess.run(["ip", "netns", "add", space], check=True)
        self.addCleanup(subprocess.run, ["ip", "netns", "del", space])
        subprocess.run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "-n", space, "address", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        there = {"command": ["ip", "netns", "exec", space], "MASTER_ADDR": "::1"}
        self.expect_trained(self.world(29500, **there))
        ranks = self.world(29500, steps=10**6, GLOO_SOCKET_IFNAME="lo", **there)
        for rank in ranks:
            rank.wait_for("step 100")
        ranks[1].process.send_signal(signal.SIGKILL)
        self.assertEqual(ranks[0].end(), 1)
        self.assertRegex(ranks[0].text(), "learned after .*rank 1 of 2 has ended, or left the process group")

    def test_poor_surroundings(self):
        """The ranks have 64 descriptors, a folder that nobody can write to, and no HOME."""
        self.expect_trained(self.world(
            free_port(), command=WITH_64_DESCRIPTORS, cwd="/proc", HOME=None, TMPDIR="/nowhere"))

    @needs_namespaces
    def test_no_dev_shm(self):
        """Shared memory works without /dev/shm."""
        hidden = ["unshare", "--mount", "bash", "-ec", 'mount -t tmpfs -o ro none /dev/shm; exec "$@"', "-"]
        self.expect_trained(self.world(free_port(), backend="shm", command=hidden + WITH_64_DESCRIPTORS))


if __name__ == "__main__":
    unittest.main()
