# What PyTorch 2.13 to 2.15 added to its wrapper; newer_wrapper.cpp ports it. torchrun --standalone
# --nproc-per-node 2 newer_wrapper.py
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(64, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.last(torch.relu(self.hidden(x)))


def numbers(shape, seed):
    """Numbers between -1 and 1 that C++ draws, too."""
    places = torch.arange(torch.Size(shape).numel())
    return (((places * 37 + seed * 11 + places * places) % 101 - 50).double() / 50).view(shape)


def print_of_all(name, value):
    """Rank 0 prints every rank's number."""
    value = value.detach()
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    if dist.get_rank() == 0:
        print(f"{name}:", *(one.item() for one in gathered))


def train(name, by_hand=False, passes=1, **options):
    rank = dist.get_rank()
    net = Net().double()
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(numbers(parameter.shape, seed) / 2)
        net.norm.running_mean.fill_(rank + 1)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, **options)
    model.require_manual_backward_finalization = by_hand
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for p in range(passes):
            model.require_backward_grad_sync = p == passes - 1
            x, y = numbers((4, 1, 6, 6), rank + 2 * p), numbers((4, 3), rank)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        if by_hand:
            model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
        print_of_all(f"{name}: step {step}", loss)
    if model.forward_sync_buffers:
        for buffer in net.buffers():  # as the next forward would; ddp's are equal after backward
            dist.broadcast(buffer, 0)
    print_of_all(f"{name}: mean", net.norm.running_mean.sum())
    print_of_all(f"{name}: weights", sum(p.detach().cos().sum() for p in net.parameters()))


if __name__ == "__main__":
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        sys.exit(77)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train("buffers synchronised", forward_sync_buffers=True)
    train("buffers synchronised at construction", forward_sync_buffers=False)
    train("buffers never synchronised", broadcast_buffers=False)
    train("lazy buckets", lazy_bucket_allocation=True)
    train("lazy buckets, views", lazy_bucket_allocation=True, gradient_as_bucket_view=True)
    train("by hand", by_hand=True)
    train("by hand, 2 passes a step", by_hand=True, passes=2, lazy_bucket_allocation=True)
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
