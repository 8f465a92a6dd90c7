"""Ranks under a real SLURM, on two made-up hosts.

usage: slurm_test.py BIN LAUNCH_FOLDER [CASE...]. Exit code 77: skipped, SLURM or namespaces are missing.
"""

import os
import re
import signal
import subprocess
import sys
import time

from slurm_cluster import Slurm, in_namespaces_of_our_own, pids_of, wait_until

BIN, FOLDER = map(os.path.abspath, sys.argv[1:3])
PROBE, MNIST, MPI, ELASTIC = (f"{BIN}/{name}" for name in ("world_probe", "mnist", "mpi_world", "elastic"))


# How soon a job has ended depends on the machine's load: cases print the seconds, and check the events that come
# with the end. A bound is ten times what a machine with nothing else to do may take, 3 s and 2 s, and far below
# what ranks wait that do not learn of a loss (timeout(), 30 minutes), or that do not end by SIGTERM (KillWait).
BOUND_OF_KILL, BOUND_OF_SCANCEL = 30, 20


def expect(condition, what, output):
    if not condition:
        raise AssertionError(f"expected {what}, got\n{output}")


def expect_world(size, output):
    met = re.findall(rf"rank (\d+) of {size} sum {size * (size - 1) // 2} ", output)
    expect(sorted(map(int, met)) == list(range(size)), f"{size} ranks that met", output)


def srun_meets(slurm):
    for arguments, size in ((["-n", "2"], 2), (["-N", "2", "-n", "4"], 4), (["-N", "2", "-n", "3"], 3),
                            (["--mpi=pmi2", "-N", "2", "-n", "4"], 4),
                            (["-n", "1", PROBE, ":", "-n", "2"], 3)):  # a heterogeneous job: a host for each part
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
            slurm.hosts.on(
                "login", "srun", "--label", "--kill-on-bad-exit=0", "-N", "2", "-n", "4", MNIST, "--epochs", "6000"),
            stdout=file, stderr=subprocess.STDOUT)
    wait_until("training", lambda: "training on" in log.read_text(), text=log.read_text)
    victim, = pids_of(
        lambda arguments, environment: arguments[0] == MNIST and environment.get("SLURM_PROCID") == "3")
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    wait_until("srun's end", lambda: step.poll() is not None, BOUND_OF_KILL, log.read_text)
    left = pids_of(lambda arguments, _: arguments[0] == MNIST)
    expect(not left, f"no rank once srun has ended, got {left}", log.read_text())
    expect(step.returncode != 0, "an error", log.read_text())
    for rank in range(3):
        expect(re.search(rf"^{rank}: .*rank 3 of 4 .*has ended", log.read_text(), re.M),
               f"a text of rank {rank} that names rank 3", log.read_text())
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
    expect(job.end(BOUND_OF_SCANCEL) == "CANCELLED", "a cancelled job", job.text())
    took, left = time.monotonic() - began, job.processes()
    expect(not left, f"no process once the job has ended, got {left}", job.text())
    print(f"  nothing was left {took:.1f} s after scancel")


def batch_shell_without_srun_is_an_error(slurm):
    job = slurm.submit("-n", "4", "--wrap", PROBE)
    expect(job.end() == "FAILED", "a failed job", job.text())
    expect("srun" in job.text() and "SLURM_NTASKS" in job.text(), "an error that says srun", job.text())


def allocation_starts_programs(slurm):
    """A program alone is a world of one, also in the shell that salloc opens in a step of its own, with SLURM_PROCID.
    srun there, and mpirun, start ranks on both hosts, which find the first one."""
    code, output = slurm.run("salloc", "-N", "2", "-n", "4", PROBE)
    expect(code == 0 and "rank 0 of 1 sum 0" in output, "a world of one", output)
    code, output = slurm.run("sh", "-c", f"echo 'echo number $SLURM_PROCID; {PROBE}; srun {PROBE}' | salloc -N 2 -n 4")
    expect("number 0\n" in output, "SLURM_PROCID in salloc's shell", output)
    expect(code == 0 and "rank 0 of 1 sum 0" in output, "a world of one in the shell", output)
    expect_world(4, output)
    code, output = slurm.run("salloc", "-N", "2", "-n", "4", "mpirun", "--allow-run-as-root", PROBE)
    expect(code == 0, "exit code 0 of mpirun", output)
    expect_world(4, output)


def notice_saves_and_requeues(slurm):
    """The signal before the end of the time: saved, queued again by the script, and resumed at that step.

    SLURM looks at the times every 30 seconds after its start, and the file asks for the signal 60 before the end.
    """
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", f"{FOLDER}/slurm.sbatch", MNIST, "--epochs", "6000",
                       "--checkpoint", slurm.folder / "at_notice", "--resume", "--leave-on-signal")
    job.wait_for("epoch 1/6000")  # a signal before its handler is there would be the end
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    wait_until_requeued(job)
    left = re.search(r"leaves after step (\d+), which is saved", job.text())
    expect(left, "ranks that leave", job.text())
    resumes_after(left[1], job)


def lost_host_requeues(slurm):
    """The host of rank 0 and of the script: SLURM itself puts the job into the queue again."""
    checkpoints = slurm.folder / "at_loss"
    job = slurm.submit("--ntasks-per-node=2", "--cpus-per-task=1", f"{FOLDER}/slurm.sbatch", MNIST, "--epochs", "6000",
                       "--checkpoint", checkpoints, "--checkpoint-every", "5", "--resume", "--leave-on-signal")
    wait_until("a checkpoint", lambda: list(checkpoints.glob("step-*")), text=job.text)
    slurm.lose("node0")
    wait_until_requeued(job)
    slurm.start("node0")
    resumes_after(max(int(folder.name[len("step-"):]) for folder in checkpoints.glob("step-*")), job)


def wait_until_requeued(job):
    wait_until("the job in the queue again", lambda: job.states() == ["PENDING"], text=job.text)
    expect(not job.processes(), f"no process of a job in the queue, got {job.processes()}", job.text())


def resumes_after(step, job):
    # SLURM would wait for two minutes. Hosts take no start of a job within the second in which it ended.
    wait_until("idle hosts", job.slurm.is_idle, text=job.text)
    job.slurm.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+2", "TimeLimit=10")
    resumed = wait_until(
        "ranks that resume", lambda: re.search(r"resumed after step (\d+)\n", job.text()), text=job.text)
    expect(int(resumed[1]) == int(step), f"ranks that resume after step {step}", job.text())
    job.slurm.run("scancel", job.id)
    job.end()


def elastic_job_replaces_a_rank(slurm):
    job = slurm.submit("--cpus-per-task=4", f"{FOLDER}/elastic.sbatch", ELASTIC, "300")
    wait_until("all 8 ranks", lambda: re.search(r"generation \d+: 8 ranks", job.text()), text=job.text)
    os.kill(pids_of(lambda arguments, environment: arguments[0] == ELASTIC and environment.get("DDP_SLOT") == "5")[0], 9)
    job.wait_for("; joined: 5 ")
    slurm.run("scancel", job.id)
    expect(job.end() == "CANCELLED" and not job.processes(), "a job that leaves nothing", job.text())


CASES = [srun_meets, mpi_runs_over_pmix, shipped_files_start_their_ranks, array_jobs_share_a_host, killed_rank_is_named,
         cancelled_job_leaves_nothing, batch_shell_without_srun_is_an_error, allocation_starts_programs,
         elastic_job_replaces_a_rank, notice_saves_and_requeues, lost_host_requeues]

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
