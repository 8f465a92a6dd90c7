"""SLURM on two made-up hosts: munged, slurmctld on "login", slurmd on "node0" and "node1".

No systemd, no control groups, no accounting. What is in the files is what SLURM 22.05 needs; see its manual. KillWait,
after which SLURM kills what SIGTERM has not ended, is longer than a case waits: ranks that need it fail their case.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from made_up_hosts import Hosts, in_namespaces_of_our_own, pids_of, skip  # noqa: E402,F401 for the cases, too

PATIENCE = 60  # seconds, for what takes less than one

CONFIGURATION = """\
ClusterName=made_up
SlurmctldHost=login
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
LaunchParameters=use_interactive_step
InteractiveStepOptions="--interactive --preserve-env /bin/sh"
ReturnToService=2
KillWait=300
TmpFS={folder}/tmp_%n
NodeName=node[0-1] CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def wait_until(what, condition, seconds=PATIENCE, text=lambda: ""):
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain for {what}\n{text()}")
        time.sleep(0.05)


class Slurm:
    def __init__(self):
        for program in ("slurmctld", "slurmd", "srun", "munged"):
            if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
                skip(f"there is no {program}; scripts/setup.sh --dev installs it")
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        self.hosts = Hosts("login", "node0", "node1")
        self.folder = self.hosts.folder
        for name in ("controller", "node0", "node1", "tmp_node0", "tmp_node1"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._start_munge()
        self.hosts.run(*self.hosts.on("login", "slurmctld", "-c"))
        for node in ("node0", "node1"):
            self.start(node)
        wait_until("two idle nodes", self.is_idle, text=self.logs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error[0]:
            print(self.logs())

    def start(self, node):
        self.hosts.run(*self.hosts.on(node, "slurmd"))

    def lose(self, node):
        """Ends all that runs on the host, and has the controller know it, which would wait for SlurmdTimeout."""
        while pids := self.hosts.run("ip", "netns", "pids", node).split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def is_idle(self):
        return self.ask("sinfo", "-h", "-o", "%T%D").strip() == "idle2"

    def _start_munge(self):
        # A key of this test, over the machine's own if there is one.
        self.hosts.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/etc/munge")
        with open("/etc/munge/munge.key", "wb") as key:
            key.write(os.urandom(128))
        os.chmod("/etc/munge/munge.key", 0o400)
        shutil.chown("/etc/munge", "munge", "munge")
        shutil.chown("/etc/munge/munge.key", "munge", "munge")
        state = self.folder / "munge"
        for place in (state, "/run/munge"):
            os.mkdir(place, 0o755)
            shutil.chown(place, "munge", "munge")
        os.chmod(self.folder, 0o755)
        self.hosts.run("runuser", "-u", "munge", "--", "/usr/sbin/munged", f"--log-file={state}/log",
                       f"--pid-file={state}/pid", f"--seed-file={state}/seed")

    def logs(self):
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self.folder.glob("*.log"))

    def ask(self, *command):
        """What a command on the login host prints; also if it fails."""
        return subprocess.run(self.hosts.on("login", *command), capture_output=True, text=True, timeout=PATIENCE).stdout

    def run(self, *command):
        """(exit code, output) of a command on the login host."""
        try:
            ended = subprocess.run(
                self.hosts.on("login", *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            printed = (error.output or b"").decode(errors="replace")  # bytes, whatever `text` says
            raise AssertionError(f"{command} still ran after {PATIENCE} s:\n{printed}") from None
        return ended.returncode, ended.stdout

    def submit(self, *arguments):
        return Job(self, arguments)


class Job:
    """A job of sbatch, and what it has printed."""

    def __init__(self, slurm, arguments):
        self.slurm = slurm
        self.file = slurm.folder / f"job_{time.monotonic_ns()}.txt"
        printed = slurm.run("sbatch", "--parsable", "-o", self.file, "--open-mode=append", *arguments)[1]
        self.id = printed.strip().split("\n")[-1]
        if not self.id.isdigit():
            raise AssertionError(f"sbatch: {printed}")

    def text(self):
        return self.file.read_text(errors="replace") if self.file.exists() else ""

    def states(self):
        """Of each job of the array, or of the one job."""
        fields = self.slurm.ask("scontrol", "show", "job", self.id).split()
        return [field.split("=")[1] for field in fields if field.startswith("JobState=")]

    def wait_for(self, text):
        return wait_until(f"'{text}' from job {self.id}", lambda: text in self.text(), text=self.text)

    def processes(self):
        """Its processes on all hosts: ranks, srun and script."""
        return pids_of(lambda _, environment: environment.get("SLURM_JOB_ID") == self.id)

    def end(self, seconds=PATIENCE):
        """The states in which all its jobs have ended, as one word where they are one."""
        def ended():
            states = self.states()
            return set(states) if states and set(states) <= ENDS else None

        return " ".join(wait_until(f"the end of job {self.id}", ended, seconds, self.text))
