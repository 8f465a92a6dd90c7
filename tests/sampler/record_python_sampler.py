#!/usr/bin/env python3
"""Records what Python's torch.utils.data.DistributedSampler gives for many configurations.

    python3 tests/sampler/record_python_sampler.py > tests/sampler/python_sampler.txt

One line a configuration: its arguments, the samples of a rank, and a hash over the indices of all
ranks in order. shard_test.cpp computes the same from the C++ sampler.
"""

import random
import sys

import torch
from torch.utils.data.distributed import DistributedSampler

CONFIGURATIONS = 400
MASK = (1 << 64) - 1


def fold(state, value):
    """One step of FNV-1a, over 64-bit words instead of bytes."""
    return ((state ^ value) * 0x100000001B3) & MASK


def draw(rng):
    size = rng.choice([rng.randrange(20), rng.randrange(1000), rng.randrange(20000)])
    if rng.random() < 0.03:
        size = rng.randrange(20000, 120000)
    replicas = rng.choice([1, 2, 3, 4, 7, 8, rng.randrange(1, 65)])
    seed = rng.choice([0, rng.randrange(1000), -rng.randrange(1, 1000), rng.randrange(1 << 62)])
    epoch = rng.choice([0, 1, rng.randrange(1000)])
    return size, replicas, int(rng.random() < 0.8), seed, epoch, int(rng.random() < 0.4)


def main():
    rng = random.Random(0)
    print(f"# torch {torch.__version__}: DistributedSampler, by {sys.argv[0].rsplit('/')[-1]}")
    print("# dataset_size num_replicas shuffle seed epoch drop_last len hash")
    for _ in range(CONFIGURATIONS):
        size, replicas, shuffle, seed, epoch, drop_last = draw(rng)
        state = 0xCBF29CE484222325
        for rank in range(replicas):
            sampler = DistributedSampler(
                range(size), replicas, rank, bool(shuffle), seed, bool(drop_last)
            )
            sampler.set_epoch(epoch)
            for index in sampler:
                state = fold(state, index)
        print(size, replicas, shuffle, seed, epoch, drop_last, len(sampler), f"{state:016x}")


if __name__ == "__main__":
    main()
