"""`ddp_bench --tp` for Python's torch.distributed.tensor.parallel: the same layers, turns and lines.

    ddprun -n 2 python3 tensor_parallel_peer.py --iters 5 --rounds 5
"""

import argparse
import json
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from peer_statistics import paired_ratio, quantile

FEATURES, HIDDEN, ROWS = 1024, 4096, 512  # as in tensor_parallel_run.cpp
LEARNING_RATE = 1e-3


class Layers:
    def __init__(self, seed, mesh=None):
        torch.manual_seed(seed)
        self.input = torch.randn(ROWS, FEATURES).requires_grad_()
        self.target = torch.randn(ROWS, FEATURES)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, FEATURES)
        )
        if mesh is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            self.net = parallelize_module(self.net, mesh, plan)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE)

    def step(self):
        self.optimizer.zero_grad()
        self.input.grad = None
        (self.net(self.input) - self.target).square().sum(1).mean().backward()
        self.optimizer.step()


class Times:
    def __init__(self):
        self.of_steps = []
        self.of_rounds = []

    def take_turn(self, steps, step):
        ms = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            ms.append((time.perf_counter() - start) * 1000)
        dist.barrier()
        self.of_rounds.append(quantile(ms, 0.5))
        self.of_steps += ms


def send_messages(memory):
    start = time.perf_counter()
    for message in memory:
        dist.all_reduce(message)
    return (time.perf_counter() - start) * 1000


def largest_difference(whole, cut):
    """Collective; of the parameters, which took the same steps."""
    gathered = [parameter.detach().full_tensor() for parameter in cut.net.parameters()]
    if whole is None:
        return 0.0
    pairs = zip(whole.net.parameters(), gathered)
    return max((ours.detach() - other).abs().max().item() for ours, other in pairs)


def run(options):
    torch.set_num_threads(options.threads)
    speaks = dist.get_rank() == 0
    whole = Layers(options.seed) if speaks else None
    cut = Layers(options.seed, init_device_mesh("cpu", (dist.get_world_size(),)))
    step_whole = whole.step if speaks else lambda: None
    Times().take_turn(options.warmup, step_whole)
    Times().take_turn(options.warmup, cut.step)
    whole_ms, cut_ms, messages_ms = Times(), Times(), []
    memory = torch.zeros(2, ROWS, FEATURES).unbind()
    for index in range(options.rounds):
        turns = [(whole_ms, step_whole), (cut_ms, cut.step)]
        for times, step in turns if index % 2 == 0 else reversed(turns):
            times.take_turn(options.iters, step)
        messages_ms += [send_messages(memory) for _ in range(options.iters)]
    difference = largest_difference(whole, cut)
    if not speaks:
        return
    common = {"model": "linear_layers", "backend": "gloo", "world": dist.get_world_size()}
    print(json.dumps({**common, "mode": "py_one_rank", "step_ms": quantile(whole_ms.of_steps, 0.5)}))
    speedup, _, of_rounds = paired_ratio(whole_ms.of_rounds, cut_ms.of_rounds)
    step_ms, sent_ms = quantile(cut_ms.of_steps, 0.5), quantile(messages_ms, 0.5)
    result = {
        **common,
        "mode": "py_tensor_parallel",
        "step_ms": step_ms,
        "speedup": speedup,
        "speedup_of_rounds": of_rounds,
        "messages_ms": sent_ms,
        "messages_share": sent_ms / step_ms,
    }
    print(json.dumps(result), flush=True)
    if difference > 1e-5:
        sys.exit(f"tensor_parallel_peer.py: the parameters differ by {difference}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see leave() of ddp_peer.py


main()
