# Trains small models by Python's wrapper over Gloo and prints what wrapper_runs.cpp must print, too.
# Two and four ranks make the 28 runs of wrapper_runs.txt:
#
#   for n in 2 4; do ddprun -n $n scripts/python_with_torch.sh tests/mpi/wrapper_runs.py; done
import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
KINDS = ("plain", "convolution", "shared", "unused", "sparse", "accumulated", "hook")


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "convolution":
            self.conv = nn.Conv2d(1, 4, 3, bias=False)
            self.norm = nn.BatchNorm2d(4)
            self.last = nn.Linear(64, 3)
        elif kind == "sparse":
            self.table = nn.Embedding(20, 6, sparse=True)
            self.last = nn.Linear(18, 3)
        else:
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

    def forward(self, x, whole):
        if self.kind == "convolution":
            x = torch.relu(self.norm(self.conv(x))).flatten(1)
        elif self.kind == "sparse":
            x = self.table(x).flatten(1)
        else:
            x = torch.relu(self.first(x))
            if self.kind == "shared":
                x = torch.relu(self.first(x))
            if whole:
                x = x + torch.relu(self.second(x))
        return self.last(x)


def numbers(shape, seed):
    """Numbers between -1 and 1 that C++ draws, too."""
    places = torch.arange(torch.Size(shape).numel())
    return (((places * 37 + seed * 11 + places * places) % 101 - 50).double() / 50).view(shape)


def batch(kind, seed):
    if kind == "sparse":
        return (torch.arange(12).view(4, 3) * 7 + seed * 5) % 20
    return numbers((4, 1, 6, 6) if kind == "convolution" else (4, 6), seed)


def digest(tensors):
    """Two sums, of which the second tells places apart."""
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    return flat.sum(), (flat * torch.arange(flat.numel()).double().cos()).sum()


def train(kind, small):
    dtype = torch.float32 if kind == "hook" else torch.float64
    net = Net(kind).to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(numbers(parameter.shape, seed) / 2)
    options = {"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True} if small else {}
    model = DistributedDataParallel(net, find_unused_parameters=kind == "unused", **options)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0 if kind == "sparse" else 0.9)
    rank, size = dist.get_rank(), dist.get_world_size()
    passes = 3 if kind == "accumulated" else 1
    losses = []
    for step in range(STEPS):
        for p in range(passes):
            seed = (step * passes + p) * size + rank
            x = batch(kind, seed)
            x = x if kind == "sparse" else x.to(dtype)
            whole = kind != "unused" or (step + rank) % 3 == 0
            with contextlib.nullcontext() if p == passes - 1 else model.no_sync():
                loss = nn.functional.mse_loss(model(x, whole), numbers((4, 3), seed + 1).to(dtype))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    values = [*losses, *digest(net.parameters())]
    if buffers := list(net.buffers()):
        for buffer in buffers:  # as the next forward would; ddp's are equal after backward
            dist.broadcast(buffer, 0)
        values += digest(buffers)
    mine = torch.stack(values)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    if rank == 0:
        name = f"{size} ranks, {kind}{', small buckets' if small else ''}"
        for r, values in enumerate(gathered):
            print(f"{name}, rank {r}:", *(f"{v:.17g}" for v in values.tolist()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in KINDS:
        for small in (False, True):
            train(kind, small)
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
