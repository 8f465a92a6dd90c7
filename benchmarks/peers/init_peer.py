"""Python's counterpart of ../costs/init_time.cpp: the same lines in, the same lines out."""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def time_init(backend, port, rank, world_size):
    start = time.monotonic()
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=5),
    )
    dist.barrier()
    return time.monotonic() - start


def time_wrap(net):
    start = time.monotonic()
    model = DistributedDataParallel(net)
    dist.barrier()
    seconds = time.monotonic() - start
    del model
    return seconds


def main():
    rank, world_size = (int(argument) for argument in sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        backend, port = line.split()
        net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        init = time_init(backend, port, rank, world_size)
        print(f"{init:.6f} {time_wrap(net):.6f}", flush=True)
        sys.stdin.readline()
        dist.destroy_process_group()
        print("ready", flush=True)


main()
