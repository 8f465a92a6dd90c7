"""Agents of torchrun join and leave while a world trains: it continues from its last checkpoint with
the present number of ranks, and learns what an undisturbed run does.

elastic_test.py TORCHRUN ELASTIC_WORLD. Exit code 77: skipped, no torchrun is usable here.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from free_port import free_port  # noqa: E402

PATIENCE = 200  # seconds
torchrun, program = sys.argv[1:3]
started = time.monotonic()


def skip():
    print(f"skipped: {torchrun} does not run")
    sys.exit(77)


def fail(what):
    if subprocess.run([torchrun, "--help"], capture_output=True, check=False).returncode != 0:
        skip()
    logs = "".join(f"--- {a.name}\n{a.log()}" for a in agents)
    sys.exit(f"FAILED: {what}\n{logs}")


def wait_until(what, condition):
    while not condition():
        if agents[0].process.poll():
            fail(f"the first agent ended before {what}")
        if time.monotonic() - started > PATIENCE:
            fail(f"waited in vain until {what}")
        time.sleep(0.05)


def descendants(pid):
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat:
                parents[int(entry)] = int(stat.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


class Agent:
    """One host's torchrun, with one rank."""

    def __init__(self, name, hosts_rendezvous=False):
        self.name = name
        conf = ("last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,"
                f"is_host={hosts_rendezvous}")
        command = [
            torchrun, "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
            f"--rdzv-conf={conf}", "--monitor-interval=0.2", "--no-python", program, folder,
        ]
        # With the store that torchrun shares with the ranks, an agent that comes later waits for an
        # address which is not there.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(f"{folder}/{name}.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        agents.append(self)

    def log(self):
        with open(f"{folder}/{self.name}.log", errors="replace") as log:
            return log.read()

    def kill(self):
        """Kills the agent as a power failure of its host would."""
        for pid in reversed(descendants(self.process.pid)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def worlds():
    """Returns the number of ranks of each start, from rank 0's log on whichever host it is."""
    starts = []
    for agent in agents:
        starts += re.findall(r"(\d) ranks resumed after step (\d+)", agent.log())
    return sorted((int(step), int(ranks)) for ranks, step in starts)


def newest_checkpoint():
    try:
        names = os.listdir(f"{folder}/checkpoints")
    except OSError:
        return 0
    return max([int(n[5:]) for n in names if n.startswith("step-")], default=0)


if not os.access(torchrun, os.X_OK):
    skip()
port = free_port()
agents = []
with tempfile.TemporaryDirectory(prefix="ddp-test-elastic-") as folder:
    try:
        first, second, third = Agent("first", hosts_rendezvous=True), Agent("second"), Agent("third")
        wait_until("three ranks train", lambda: (worlds() or [(0, 0)])[-1][1] == 3)
        of_three = newest_checkpoint() + 15
        wait_until("three ranks have saved", lambda: newest_checkpoint() >= of_three)
        second.kill()
        wait_until("two ranks go on", lambda: worlds()[-1][1] == 2)
        saved = newest_checkpoint()
        wait_until("two ranks have saved", lambda: newest_checkpoint() > saved)
        fourth = Agent("fourth")
        wait_until("three ranks go on", lambda: worlds()[-1][1] == 3)
        saved = newest_checkpoint()
        wait_until("they have saved", lambda: newest_checkpoint() >= saved + 50)
        open(f"{folder}/enough", "w").close()
        for agent in (first, third, fourth):
            wait_until(f"{agent.name} has ended", lambda: agent.process.poll() is not None)
            if agent.process.returncode != 0:
                fail(f"{agent.name} ended with exit code {agent.process.returncode}")
        output = "".join(a.log() for a in agents)
        # Agents that come more than a second apart, on a busy machine, first start a smaller world.
        starts = iter(worlds())
        three, two, again = (next((start for start in starts if start[1] == ranks), None) for ranks in (3, 2, 3))
        if again is None:
            fail(f"expected 3, 2 and 3 ranks, got (step, ranks) {worlds()}")
        if not three[0] < of_three <= two[0] < again[0]:
            fail(f"expected each start to go on where the last one was, got {worlds()}")
        end = re.search(r"3 ranks ended equal, with y = (\S+) x \+ (\S+)", output)
        if end is None:
            fail("expected equal parameters at the end")
        if abs(float(end[1]) - 3) > 0.01 or abs(float(end[2]) + 1) > 0.01:
            fail(f"expected y = 3 x - 1, got {end[0]}")
        print(f"(step, ranks) of each start: {worlds()}; {end[0]}")
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.kill()
