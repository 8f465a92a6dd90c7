"""Ranks under a real SLURM, on two made-up hosts.

usage: slurm_test.py BIN LAUNCH_FOLDER [CASE...]. Exit code 77: skipped, SLURM or namespaces are missing.
"""

import os
import re
import signal
import subprocess
import sys
import time

from made_up_hosts import in_namespaces_of_our_own, pids_of
from slurm_cluster import PATIENCE, Slurm, wait_until

BIN, FOLDER = map(os.path.abspath, sys.argv[1:3])
PROBE, MNIST, MPI, ELASTIC = (f"{BIN}/{name}" for name in ("world_probe", "mnist", "mpi_world", "elastic"))


def expect(condition, what, output):
    if not condition:
        raise AssertionError(f"expected {what}, got\n{output}")


def expect_world(size, output):
    met = re.findall(rf"rank (\d+) of {size} sum {size * (size - 1) // 2} ", output)
    expect(sorted(map(int, met)) == list(range(size)), f"{size} ranks that met", output)


def srun_meets(slurm):
    for arguments, size in ((["-n", "2"], 2), (["-N", "2", "-n", "4"], 4), (["-N", "2", "-n", "3"], 3),
                            (["--mpi=pmi2", "-N", "2", "-n", "4"], 4)):
        code, output = slurm.run("srun", *arguments, PROBE)
        expect(code == 0, f"exit code 0 of srun {arguments}", output)
        expect_world(size, output)


def shipped_files_start_their_ranks(slurm):
    for arguments, size in ((["--ntasks-per-node=2", "--cpus-per-task=1", f"{FOLDER}/slurm.sbatch", PROBE], 4),
                            (["--cpus-per-task=4", f"{FOLDER}/slurm_ddprun.sbatch", PROBE], 8)):
        job = slurm.submit(*arguments)
        expect(job.end() == "COMPLETED", f"a completed job of {arguments}", job.text())
        expect_world(size, job.text())


def killed_rank_is_named(slurm):
    log = slurm.folder / "killed.txt"
    with open(log, "w", encoding="utf-8") as file:
        step = subprocess.Popen(
            slurm.hosts.on("login", "srun", "--kill-on-bad-exit=0", "-N", "2", "-n", "4", MNIST, "--epochs", "6000"),
            stdout=file, stderr=subprocess.STDOUT)
    wait_until("training", lambda: "training on" in log.read_text(), text=log.read_text)
    victim, = pids_of(
        lambda arguments, environment: arguments[0] == MNIST and environment.get("SLURM_PROCID") == "3")
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    step.wait(timeout=PATIENCE)
    expect(re.search(r"rank 3 of 4 .*has ended", log.read_text()), "a text that names rank 3", log.read_text())
    expect(step.returncode != 0, "an error", log.read_text())
    print(f"  the step was over {time.monotonic() - began:.1f} s after the kill")


def mpi_runs_over_pmix(slurm):
    code, output = slurm.run("srun", "--mpi=pmix", "-N", "2", "-n", "4", MPI, "meet_for_others")
    expect(code == 0 and "ok meet_for_others" in output, "'ok meet_for_others'", output)


def array_jobs_share_a_host(slurm):
    """Two jobs of one array, which run at the same time, have two worlds with a port each."""
    meet = slurm.folder / "meet.sh"
    meet.write_text(f"""#!/bin/sh
touch {slurm.folder}/started_$SLURM_JOB_ID
until [ "$(ls {slurm.folder}/started_* | wc -l)" = 2 ]; do sleep 0.1; done
exec {PROBE} shm
""")
    meet.chmod(0o755)
    job = slurm.submit("--array=0-1", "--nodes=1", "--nodelist=node0", "--ntasks-per-node=2", "--cpus-per-task=1",
                       f"{FOLDER}/slurm.sbatch", meet)
    expect(job.end() == "COMPLETED", "completed jobs", job.text())
    expect(job.text().count("rank 1 of 2 sum 1 ") == 2, "two worlds of 2", job.text())


def cancelled_job_leaves_nothing(slurm):
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", f"{FOLDER}/slurm.sbatch", MNIST, "--epochs", "6000")
    job.wait_for("training on")
    slurm.run("scancel", job.id)
    began = time.monotonic()
    wait_until("the ranks' end", lambda: not ranks_of(job))
    print(f"  no rank was left {time.monotonic() - began:.1f} s after scancel")


def batch_shell_without_srun_is_an_error(slurm):
    job = slurm.submit("-n", "4", "--wrap", PROBE)
    expect(job.end() == "FAILED", "a failed job", job.text())
    expect("srun" in job.text() and "SLURM_NTASKS" in job.text(), "an error that says srun", job.text())


def allocation_starts_programs(slurm):
    """A program alone is a world of one; mpirun starts ranks on both hosts, which find the first one."""
    code, output = slurm.run("salloc", "-N", "2", "-n", "4", PROBE)
    expect(code == 0 and "rank 0 of 1 sum 0" in output, "a world of one", output)
    code, output = slurm.run("salloc", "-N", "2", "-n", "4", "mpirun", "--allow-run-as-root", PROBE)
    expect(code == 0, "exit code 0 of mpirun", output)
    expect_world(4, output)


def notice_saves_and_requeues(slurm):
    """A signal before the end of the time: saved, queued again by the script, and resumed at that step."""
    checkpoints = slurm.folder / "checkpoints"
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", f"{FOLDER}/slurm.sbatch", MNIST, "--epochs", "6000",
                       "--checkpoint", checkpoints, "--resume", "--leave-on-signal")
    job.wait_for("epoch 1/6000")
    slurm.run("scancel", "--signal=USR1", job.id)
    # SLURM would wait for two minutes. Hosts take no start of a job within the second in which it ended.
    wait_until("the job in the queue again", lambda: job.states() == ["PENDING"] and slurm.is_idle(), text=job.text)
    slurm.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+2")
    job.wait_for("resumed after step")
    left, resumed = re.search(r"leaves after step (\d+)", job.text()), re.search(r"resumed after step (\d+)", job.text())
    expect(left and left[1] == resumed[1], "the step after which the ranks left", job.text())
    slurm.run("scancel", job.id)
    wait_until("the ranks' end", lambda: not ranks_of(job))


def elastic_job_replaces_a_rank(slurm):
    job = slurm.submit("--cpus-per-task=4", f"{FOLDER}/elastic.sbatch", ELASTIC, "300")
    wait_until("all 8 ranks", lambda: re.search(r"generation \d+: 8 ranks", job.text()), text=job.text)
    os.kill(pids_of(lambda arguments, environment: arguments[0] == ELASTIC and environment.get("DDP_SLOT") == "5")[0], 9)
    job.wait_for("; joined: 5 ")
    slurm.run("scancel", job.id)
    wait_until("the ranks' end", lambda: not pids_of(lambda arguments, _: arguments[0] == ELASTIC))


def ranks_of(job):
    return pids_of(lambda arguments, environment: arguments[0] == MNIST and environment.get("SLURM_JOB_ID") == job.id)


CASES = [srun_meets, mpi_runs_over_pmix, shipped_files_start_their_ranks, array_jobs_share_a_host, killed_rank_is_named,
         cancelled_job_leaves_nothing, batch_shell_without_srun_is_an_error, allocation_starts_programs,
         notice_saves_and_requeues, elastic_job_replaces_a_rank]

if __name__ == "__main__":
    in_namespaces_of_our_own()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    with Slurm() as slurm:
        for case in CASES:
            if len(sys.argv) > 3 and case.__name__ not in sys.argv[3:]:
                continue
            began = time.monotonic()
            case(slurm)
            print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)
