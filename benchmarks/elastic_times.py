"""How long a training under `ddprun --elastic` stands still when one of its ranks is killed.

usage: elastic_times.py FOLDER [DEATHS]

FOLDER has ddprun and elastic_training_world, which scripts/build.sh makes. Kills one of 4 ranks at a
random moment, DEATHS (10) times; the others go on with --min-ranks 3, and a new process joins. Prints
the longest time from one finished step to the next on a rank that was not killed: a step takes 4 ms.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

STEPS, MILLISECONDS = 160, 4


def longest_step(folder, kind):
    with tempfile.TemporaryDirectory() as logs:
        command = [f"{folder}/ddprun", "-n", "4", "--elastic", "--min-ranks", "3", "--",
                   f"{folder}/elastic_training_world", str(STEPS), str(MILLISECONDS), logs, kind]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment) as job:
            output = ""
            while output.count("reached step 20") < 4:
                line = job.stdout.readline()
                if not line:
                    sys.exit(f"the job ended too soon:\n{output}")
                output += line
            time.sleep(random.random() * 0.2)
            slot = random.randrange(4)
            os.kill(int(re.findall(rf"slot {slot} pid (\d+)", output)[-1]), signal.SIGKILL)
            output += job.stdout.read()
        ends = re.findall(r"slot (\d): the end at step \d+, .* longest step ([\d.]+) s", output)
        times = [float(seconds) for other, seconds in ends if int(other) != slot]
        if job.returncode != 0 or len(times) < 3:
            sys.exit(f"the job failed:\n{output}")
        return max(times)


def main():
    folder = sys.argv[1]
    deaths = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    random.seed(1)
    print(f"{'':24} {'median s':>9} {'max s':>9}   load {os.getloadavg()[0]:.0f}")
    for kind, name in (("shm", "shm"), ("gloo", "gloo"), ("shm,zero", "shm, sharded optimizer")):
        times = [longest_step(folder, kind) for _ in range(deaths)]
        print(f"{name:24} {statistics.median(times):9.3f} {max(times):9.3f}")


main()
