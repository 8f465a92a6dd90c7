"""Ranks in pods, as the controllers of Kubernetes start them: two made-up hosts with process numbers of their own,
and the variables that each controller sets in its pods.

usage: pods_test.py BIN LAUNCH_FOLDER [CONTROLLER...]. Exit code 77: skipped, no namespaces here.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from made_up_hosts import Hosts, in_namespaces_of_our_own  # noqa: E402

BIN, FOLDER = map(os.path.abspath, sys.argv[1:3])
PROBE, DDPRUN = f"{BIN}/world_probe", f"{BIN}/ddprun"
PATIENCE = 60  # seconds

PODS = ["pod0", "pod1"]
# The names by which a cluster's DNS knows the pods of each controller.
ALIASES = {pod: [name.replace("#", str(index)) for name in (
    "train-#", "train-#.train", "train-node-0-#", "train-node-0-#.train", "job-master-#", "job-worker-#.job",
)] for index, pod in enumerate(PODS)}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}


def arguments_of(file):
    """What the file passes to ddprun, up to the program: its items of `args:`, in the made-up cluster's numbers."""
    text = open(f"{FOLDER}/{file}", encoding="utf-8").read()
    items = re.search(r"\n *args:\n((?: *[-#] .*\n)+)", text)[1]
    arguments = [line.strip()[2:].strip('"') for line in items.splitlines() if line.strip().startswith("-")]
    return arguments[:arguments.index("--")]


def of_pods(arguments, index):
    arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", str(index)) for argument in arguments]
    if "--nnodes" in arguments:
        arguments[arguments.index("--nnodes") + 1] = str(len(PODS))
    return arguments


# Controller: (ranks, variables of pod number i, command in it).
CONTROLLERS = {
    "indexed Job": (4, lambda i: {"JOB_COMPLETION_INDEX": i},
                    lambda i: [DDPRUN, *of_pods(arguments_of("kubernetes.yaml"), i), "--", PROBE]),
    "JobSet": (4, lambda i: {"JOB_COMPLETION_INDEX": i, "JOBSET_NAME": "train", "JOB_INDEX": 0},
               lambda i: [DDPRUN, *of_pods(arguments_of("jobset.yaml"), i), "--", PROBE]),
    "PyTorchJob": (2, lambda i: {"RANK": i, "WORLD_SIZE": 2, "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456,
                                 "PYTHONUNBUFFERED": 1},
                   lambda i: [PROBE]),
    "PyTorchJob with nprocPerNode": (
        4, lambda i: {"RANK": i, "WORLD_SIZE": 4, "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456, "PET_NNODES": 2,
                      "PET_NPROC_PER_NODE": 2, "PET_NODE_RANK": i, "PET_MASTER_ADDR": "job-master-0",
                      "PET_MASTER_PORT": 23456},
        lambda i: [DDPRUN, PROBE]),
    "TrainJob": (4, lambda i: {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 2, "PET_NODE_RANK": i,
                               "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": 29400,
                               "JOB_COMPLETION_INDEX": i},
                 lambda i: [DDPRUN, PROBE]),
    "Volcano": (2, lambda i: {"RANK": i, "WORLD_SIZE": 2, "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456,
                              "VC_TASK_INDEX": i},
                lambda i: [PROBE]),
}


class Pod:
    def __init__(self, hosts, name, command, variables):
        # PID 1 of a pod is the command: it must take signals and children as such.
        enter = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", **KUBERNETES,
                       **{key: str(value) for key, value in variables.items()}}
        self.process = subprocess.Popen(
            hosts.on(name, *enter, *command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True)

    def end(self):
        try:
            output = self.process.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            output = f"{self.process.communicate()[0]}it still ran after {PATIENCE} s"
        return self.process.returncode, output


def run(hosts, name):
    ranks, variables, command = CONTROLLERS[name]
    pods = [Pod(hosts, pod, command(index), variables(index)) for index, pod in enumerate(PODS)]
    ends = [pod.end() for pod in pods]
    text = "\n".join(output for _, output in ends)
    met = re.findall(rf"rank (\d+) of {ranks} sum {ranks * (ranks - 1) // 2} ", text)
    if any(code for code, _ in ends) or sorted(map(int, met)) != list(range(ranks)):
        raise AssertionError(f"{name}: expected {ranks} ranks that met, got {[code for code, _ in ends]}\n{text}")


if __name__ == "__main__":
    in_namespaces_of_our_own()
    made_up = Hosts(*PODS, aliases=ALIASES)
    for controller in CONTROLLERS:
        if len(sys.argv) > 3 and controller not in sys.argv[3:]:
            continue
        began = time.monotonic()
        run(made_up, controller)
        print(f"{controller}: {time.monotonic() - began:.1f} s", flush=True)
