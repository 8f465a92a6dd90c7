"""Python's counterpart of ../init_time.cpp: the same lines in, the same lines out."""

import datetime
import sys
import time

import torch.distributed as dist


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


def main():
    rank, world_size = (int(argument) for argument in sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        backend, port = line.split()
        print(f"{time_init(backend, port, rank, world_size):.6f}", flush=True)
        sys.stdin.readline()
        dist.destroy_process_group()
        print("ready", flush=True)


main()
