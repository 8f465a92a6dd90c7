"""Runs one case of the fault matrix, and observes it from outside."""

import dataclasses
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

from cases import RANKS

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from free_port import free_port  # noqa: E402

GROUP_TIMEOUT = 5  # for cases that have to wait for it
LONG_TIMEOUT = 60  # for cases that must not
GRACE = 8  # grace period that ddprun gives the survivors
# torchrun gives the survivors half a minute; after that, a case counts as hung.
PATIENCE = {"ddprun": 40, "plain": 30, "torchrun": 70}
KERNEL_PATIENCE = 2  # for the kernel to tear a process down
MARK = "DDP_FAULT_CASE"
TORCHRUN_LOGS = "torchrun"


@dataclasses.dataclass(frozen=True)
class Programs:
    world: str
    ddprun: str
    torchrun: str


@dataclasses.dataclass
class Observed:
    """The observed outcome: events, exit codes, and all that a case left behind."""

    codes: list = dataclasses.field(default_factory=list)  # of the launcher; of each survivor
    output: str = ""
    struck_at: int = 0  # ms, by the ranks' clock
    learned: dict = dataclasses.field(default_factory=dict)  # rank: (ms after the fault, text)
    left: dict = dataclasses.field(default_factory=dict)  # rank: ms after the fault
    ended_after: float = 0  # s from the fault to the end of the launcher, or of the last survivor
    hung: bool = False
    left_behind: list = dataclasses.field(default_factory=list)


def needs_group_timeout(case):
    """Whether survivors can notice the fault only by the group's timeout."""
    return case.fault == "stop" or case.phase == "before"


def is_listening(port):
    """Whether a socket of this host listens on that TCP port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                return True
    return False


def processes_of(mark):
    """Returns the processes that a case has started: pid to command line."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if wanted in pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                words = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                found[int(entry)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:
            pass
    return found


def stopped(pids):
    """Selects the processes that are stopped."""
    states = {}
    for pid in pids:
        try:
            states[pid] = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            pass
    return [pid for pid, state in states.items() if state == "T"]


class Run:
    def __init__(self, case, programs):
        self.case = case
        self.programs = programs
        self.mark = uuid.uuid4().hex
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ddp-fault-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        # A pipe: if several processes append to one file at a time, lines can get lost.
        self.output_end, self.ranks_end = os.pipe()
        os.set_blocking(self.output_end, False)
        self.printed = b""
        self.port = None
        self.started = []  # the launcher, or the ranks
        self.was_helped = False  # the stopped rank of torchrun was ended
        timeout = GROUP_TIMEOUT if needs_group_timeout(case) else LONG_TIMEOUT
        self.command = [
            programs.world, case.phase, case.fault, str(case.victim), case.transport, str(timeout),
            str(self.folder / "checkpoints"),
        ]

    def observe(self, slack=0):
        try:
            self.start()
            observed = self.wait(slack)
            observed.left_behind = self.leftovers()
            return observed
        finally:
            for pid in processes_of(self.mark):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            for process in self.started:
                process.wait()
            os.close(self.output_end)
            os.close(self.ranks_end)
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self):
        if self.case.launcher == "ddprun":
            self.spawn([
                self.programs.ddprun, "-n", str(RANKS), "--grace", str(GRACE), "--",
                *self.command,
            ])
        elif self.case.launcher == "torchrun":
            self.spawn([
                self.programs.torchrun, "--no-python", "--standalone", "--nproc-per-node",
                str(RANKS), "--max-restarts", "0", "--monitor-interval", "0.1", "--log-dir",
                str(self.folder / TORCHRUN_LOGS), *self.command,
            ])
        else:
            self.port = free_port()
            for rank in range(RANKS):
                self.spawn(self.command, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS,
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=self.port)

    def spawn(self, command, **variables):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), MARK: self.mark,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.update({name: str(value) for name, value in variables.items()})
        self.started.append(subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.ranks_end, stderr=self.ranks_end,
            env=environment, cwd=self.folder, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))))

    def output(self):
        """Returns the output of the processes until now."""
        try:
            while part := os.read(self.output_end, 65536):
                self.printed += part
        except BlockingIOError:
            pass
        return self.printed.decode(errors="replace")

    def awaited(self):
        """Returns the processes that end by themselves: the launcher, or the survivors."""
        if self.case.launcher != "plain":
            return self.started
        return [p for rank, p in enumerate(self.started) if rank != self.case.victim]

    def wait(self, slack):
        end = time.monotonic() + PATIENCE[self.case.launcher] + 2 * slack
        hung = False
        while any(p.poll() is None for p in self.awaited()):
            if time.monotonic() > end:
                hung = True
                break
            self.output()  # a full pipe would block them
            self.help_torchrun()
            time.sleep(0.05)
        now_ms = time.monotonic() * 1000
        observed = parse(self.output(), self.case.victim)
        observed.hung = hung
        observed.codes = [p.poll() for p in self.awaited()]
        if observed.struck_at:
            observed.ended_after = (now_ms - observed.struck_at) / 1000
        # No launcher ends a stopped rank or reaps it.
        if self.case.launcher == "plain":
            victim = self.started[self.case.victim]
            if self.case.fault == "stop":
                victim.kill()
            victim.wait()
        return observed

    def help_torchrun(self):
        """Ends a stopped rank once the others have left, for which torchrun's agent would wait."""
        if self.was_helped or (self.case.fault, self.case.launcher) != ("stop", "torchrun"):
            return
        if len(re.findall(r"^rank \d left at ", self.output(), re.M)) < RANKS - 1:
            return
        self.was_helped = True
        for pid in stopped(processes_of(self.mark)):
            os.kill(pid, signal.SIGKILL)

    def leftovers(self):
        """Lists processes, a listening socket, and files except checkpoints and torchrun's logs."""
        left = []
        end = time.monotonic() + KERNEL_PATIENCE
        while (running := processes_of(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        left += [f"process {pid}: {command}" for pid, command in running.items()]
        if self.port and is_listening(self.port):
            left.append(f"a socket listens on port {self.port}")
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if relative.parts[0] in ("checkpoints", TORCHRUN_LOGS):
                continue
            if str(relative) != "tmp":
                left.append(f"file {relative}")
        return left


def parse(output, victim):
    observed = Observed(output=output)
    lines = re.findall(r"\brank (\d) (strikes|learned|left) at (\d+) ms(?:: (.*))?", output)
    for rank, what, at, _ in lines:
        if what == "strikes" and int(rank) == victim:
            observed.struck_at = int(at)
    for rank, what, at, text in lines:
        after = int(at) - observed.struck_at
        if what == "learned":
            observed.learned[int(rank)] = (after, text)
        elif what == "left":
            observed.left[int(rank)] = after
    return observed
