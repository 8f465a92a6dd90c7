"""`ddp_bench --fsdp` for Python's fully_shard: the same layers, turns and lines.

    ddprun -n 2 python3 fully_sharded_peer.py --iters 10 --rounds 5
    ddprun -n 1 python3 fully_sharded_peer.py --backend nccl        # on a GPU
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from peer_statistics import paired_ratio, quantile

UNITS, WIDTH, ROWS = 8, 1024, 128  # as in fully_sharded_run.cpp


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.fc(x)) + x


def device_of(options):
    if options.backend != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


class Way:
    def __init__(self, mode, options):
        torch.manual_seed(options.seed)
        self.mode, self.device = mode, device_of(options)
        net = torch.nn.Sequential(*[Layer() for _ in range(UNITS)]).to(self.device)
        if mode == "py_ddp":
            net = DistributedDataParallel(net)
        else:
            mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
            reshard = mode == "py_fsdp"
            for layer in net:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(net, mesh=mesh)
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(options.seed + 1 + dist.get_rank())
        self.input = torch.randn(ROWS, WIDTH).to(self.device)
        self.loss = 0.0

    def step(self):
        self.optimizer.zero_grad()
        loss = self.net(self.input).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.loss = loss.item()


def take_turn(way, steps):
    ms = []
    dist.barrier()
    for _ in range(steps):
        start = time.perf_counter()
        way.step()
        ms.append((time.perf_counter() - start) * 1000)
    dist.barrier()
    return ms


def run(options):
    torch.set_num_threads(options.threads)
    ways = [Way(mode, options) for mode in ("py_fsdp", "py_fsdp_kept", "py_ddp")]
    for way in ways:
        take_turn(way, options.warmup)
    of_rounds, of_steps = [[] for _ in ways], [[] for _ in ways]
    for index in range(options.rounds):
        turns = list(enumerate(ways))
        for i, way in turns if index % 2 == 0 else reversed(turns):
            ms = take_turn(way, options.iters)
            of_rounds[i].append(quantile(ms, 0.5))
            of_steps[i] += ms
    if dist.get_rank() != 0:
        return
    for i, way in enumerate(ways):
        ratio, _, rounds = paired_ratio(of_rounds[i], of_rounds[-1])
        result = {
            "model": "equal_layers",
            "mode": way.mode,
            "backend": options.backend,
            "world": dist.get_world_size(),
            "step_ms": quantile(of_steps[i], 0.5),
            "ratio": ratio,
            "ratio_of_rounds": rounds,
            "loss": way.loss,
        }
        print(json.dumps(result), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="gloo", help="gloo, or nccl, which trains on GPUs")
    options = parser.parse_args()
    if options.backend == "nccl":
        torch.cuda.set_device(device_of(options))
    dist.init_process_group(options.backend)
    run(options)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see leave() of ddp_peer.py


main()
