"""Starts ranks over MPI and looks at what they print, how they end, and what is left.

mpi_test.py MPIRUN BIN CASE, where BIN has mpi_world, ddprun and the examples *_over_mpi. Exit code 77: there is no
such MPIRUN. Run all cases with those of MPICH by hand: they find out which MPI it is.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from made_up_hosts import Hosts, in_namespaces_of_our_own  # noqa: E402

FOLDER = pathlib.Path(__file__).resolve().parent
MPIRUN, BIN, CASE = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
LIMIT = 200  # seconds


def fail(what):
    sys.exit(f"FAILED: {what}")


def is_open_mpi():
    said = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in said or "OpenRTE" in said


class Ended:
    """A command that has ended, with all that it printed."""

    def __init__(self, *command, code=0):
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        # What Open MPI asks of root, and of hosts with fewer cores than ranks.
        environment.update(
            OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1")
        # The processes of this command, by what their environment says.
        self.mark = f"MPI_TEST_MARK={os.getpid()}_{time.monotonic_ns()}"
        environment.update([self.mark.split("=")])
        job = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, start_new_session=True)
        try:
            self.output, _ = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            self.output, _ = job.communicate()
            fail(f"{command} has not ended after {LIMIT} s: {self.output}")
        self.ended_at = time.time()
        self.code = job.returncode
        if code is not None and self.code != code:
            fail(f"{command}: expected exit code {code}, got {self.code}: {self.output}")

    def says(self, *patterns, times=1):
        for pattern in patterns:
            found = len(re.findall(pattern, self.output))
            if found < times:
                fail(f"expected {times} times {pattern!r}, got {found}: {self.output}")
        return self

    def leaves_nothing(self):
        until = time.monotonic() + 20
        while left := [p for p in pathlib.Path("/proc").glob("[0-9]*") if self.is_marked(p)]:
            if time.monotonic() > until:
                fail(f"processes are left: {[p.joinpath('cmdline').read_bytes() for p in left]}")
            time.sleep(0.2)
        return self

    def is_marked(self, process):
        try:
            return self.mark.encode() in process.joinpath("environ").read_bytes()
        except OSError:
            return False


def world(ranks, *words, mpirun=(), code=0):
    return Ended(MPIRUN, *mpirun, "-n", ranks, BIN / "mpi_world", *words, code=code)


def passes(case, *ranks):
    for n in ranks:
        world(n, case).says(f"ok {case}", times=n)


def trains_as_python(*backends):
    """The runs that Python's wrapper has recorded: the same losses, parameters and buffers."""
    def read(text):
        lines = [line.split(": ", 1) for line in text.splitlines() if re.match(r"\d ranks, ", line)]
        return {name: [float(number) for number in numbers.split()] for name, numbers in lines}

    recorded = read((FOLDER / "wrapper_runs.txt").read_text())
    got, worst = {}, 0.0
    for backend in backends:
        for ranks in (2, 4):
            # Only Open MPI's launcher says where ranks of other backends meet.
            by_mpi = backend == "mpi" or (ranks == 4 and is_open_mpi())
            launcher = [MPIRUN] if by_mpi else [BIN / "ddprun", "--no-prefix"]
            ended = Ended(*launcher, "-n", ranks, BIN / "mpi_world", "train_as_python", backend)
            got.update(read(ended.output))
        if list(got) != list(recorded):
            fail(f"{backend}: expected lines for {list(recorded)}, got {list(got)}")
        for name, expected in recorded.items():
            # Sums of float16 depend on the order, and on four ranks Gloo has another.
            most = 2e-3 if "hook" in name else 1e-12
            differences = [abs(a - b) / max(1, abs(b)) for a, b in zip(got[name], expected)]
            if len(got[name]) != len(expected) or not max(differences) <= most:
                fail(f"{backend}: {name}: expected {expected} within {most}, got {got[name]}")
            if "hook" not in name:
                worst = max(worst, *differences)
    runs = len({name.rsplit(",", 1)[0] for name in recorded})
    print(f"{runs} runs over {', '.join(backends)}: at most {worst:.1e} from Python's")
    if runs != 28:
        fail("expected 28 runs")


def starts():
    world(2, "again").says("ok again", times=2)
    world(2, "meet_for_others").says("ok meet_for_others", times=2)
    Ended(BIN / "mpi_world", "alone").says("ok alone")
    world(2, "initialized_multiple").says(
        "ok initialized_multiple", "expected a program that uses MPI until it exits", times=2)
    world(2, "initialized_single").says(
        "expected MPI_THREAD_MULTIPLE, for the program has initialised MPI itself, got MPI_THREAD_SINGLE", times=2)
    world(2, "wrong_options").says(
        r"expected rank\(\) and world_size\(\) to be MPI's, \d of 2, got 0 of 7\. Leave them out\.", times=2)
    # Launchers that are not MPI's.
    Ended(BIN / "ddprun", "-n", "2", BIN / "mpi_world", "again", code=1).says(
        "expected mpirun, mpiexec or srun to start the ranks, got WORLD_SIZE 2 and no variable of theirs")
    if is_open_mpi():  # a variable that a job around this one has left
        Ended("env", "PMI_SIZE=1", MPIRUN, "-n", 2, BIN / "mpi_world", "again").says("ok again", times=2)
    else:  # Open MPI itself ends such a rank
        Ended("env", "SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=2", BIN / "mpi_world", "alone", code=1).says(
            "expected MPI to count 2 ranks, as SLURM_STEP_NUM_TASKS says, got 1")
    other = shutil.which("mpirun.mpich" if is_open_mpi() else "mpirun.openmpi")
    if other:
        count = "PMI_SIZE" if is_open_mpi() else "OMPI_COMM_WORLD_SIZE"
        Ended(other, "-n", "2", BIN / "mpi_world", "again", code=None).says(
            f"expected MPI to count 2 ranks, as {count} says, got 1",
            "the launcher is of another MPI: use mpiexec." + ("openmpi" if is_open_mpi() else "mpich"))


def faults():
    world(2, "different", code=None).says(
        r"rank 0 after .*expected every rank to call the same collective",
        r"rank 1 after .*expected every rank to call the same collective",
        "again: .*expected a working MPI, but a group over it has failed in this process").leaves_nothing()

    ended = world(2, "splits", code=None).leaves_nothing()
    ended.says(r"rank 1 after .*: .*all_to_all: expected 20 bytes of rank 0, got 8\. Let the output splits")

    # Neither waits in MPI_Finalize for the stopped one.
    stopped = world(3, "stopped", code=None).leaves_nothing()
    if stopped.code == 0:
        fail(f"expected another code than 0: {stopped.output}")

    # The last rank comes after 12 s, and the limit is 3 s.
    late = world(3, "late", code=None).says(r"rank 0 after .*: .*rank 2", r"rank 1 after .*: .*rank 2").leaves_nothing()
    if max(seconds := [float(s) for s in re.findall(r"after ([\d.]+) s: ", late.output)]) > 11:
        fail(f"expected the late rank to be named soon after 3 s, got {seconds}: {late.output}")

    # MPI's launcher ends the job of a killed rank.
    killed = world(3, "killed", code=None).leaves_nothing()
    ends_soon(killed)
    if killed.code == 0:
        fail(f"expected another code than 0: {killed.output}")
    if not is_open_mpi():
        return
    # Where it lets the others live, they name the killed one.
    named = world(3, "killed", mpirun=["--enable-recovery"], code=None).leaves_nothing()
    ends_soon(named.says(r"rank 0 after .*rank 2", r"rank 1 after .*rank 2"))


def ends_soon(killed):
    took = killed.ended_at - float(re.search(r"killed at ([\d.]+)", killed.output)[1])
    if took > 15:
        fail(f"expected the job to end within 15 s of the kill, got {took:.1f}: {killed.output}")


def examples():
    with tempfile.TemporaryDirectory() as folder:
        shapes = pathlib.Path(folder) / "shapes"
        Ended(BIN / "draw_shapes", shapes, "320", "40")
        equal = "parameters: bitwise equal on 2 ranks"
        # Without MASTER_ADDR: env:// means MPI's own meeting.
        Ended(MPIRUN, "-n", 2, BIN / "mnist_over_mpi", "--backend", "mpi", "--epochs", 2).says(
            equal, r"test accuracy: [89]\d\.")
        Ended(MPIRUN, "-n", 2, BIN / "cifar10_over_mpi", "--backend", "mpi", "--data", shapes, "--epochs", 1,
              "--batch-size", 40).says(equal, "test accuracy: ")
        tiny = "--context 16 --width 32 --heads 2 --layers 2 --warmup 5 --lr 0.005 --report-every 10 --sample 40"
        trained = Ended(
            MPIRUN, "-n", 2, BIN / "transformer_over_mpi", "--backend", "mpi", "--steps", 40, *tiny.split()).says(equal)
        losses = [float(loss) for loss in re.findall(r": loss ([\d.]+)", trained.output)]
        if len(losses) != 4 or losses[-1] > losses[0] - 0.3:
            fail(f"expected 4 losses that fall, got {losses}: {trained.output}")


def two_hosts():
    """MPI's launcher starts ranks on two made-up hosts."""
    if not is_open_mpi():
        fail("this case knows the options of Open MPI's launcher")
    in_namespaces_of_our_own()
    hosts = Hosts("host0", "host1")
    agent = hosts.folder / "agent"  # in place of ssh: HOST COMMAND
    agent.write_text(f"#!/bin/sh\nshift\nexec {shlex.join(hosts.on('host1', 'sh', '-c'))} \"$*\"\n")
    agent.chmod(0o755)
    for case in ("collectives", "meet_for_others"):
        # The second half of the ranks is on the second host.
        Ended(*hosts.on(
            "host0", MPIRUN, "--host", "host0:2,host1:2", "-n", 4, "--mca", "plm_rsh_agent", agent,
            "--mca", "btl", "tcp,self", "--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0",
            BIN / "mpi_world", case)).says(f"ok {case}", times=4)


CASES = {
    "collectives": lambda: (passes("collectives", 2, 4), passes("rounding", 4)),
    "starts": starts,
    "faults": faults,
    "trains_as_python": lambda: trains_as_python("mpi", "gloo", "shm"),
    "examples": examples,
    "two_hosts": two_hosts,
    "huge": lambda: passes("huge", 2),  # by hand
}

if __name__ == "__main__":
    if not shutil.which(MPIRUN):
        print(f"skipped: there is no {MPIRUN}")
        sys.exit(77)
    CASES[CASE]()
    print(f"ok {CASE}")
