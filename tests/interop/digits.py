# The program that digits.cpp ports, on two ranks: torchrun --standalone --nproc-per-node 2
# digits.py FOLDER
import contextlib
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 7
EPOCHS = 3
BATCH = 32
FOLDER = pathlib.Path(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(self.dropout(x))


def read(split, count):
    """So many of MNIST's files."""
    images = (FOLDER / f"{split}-images-idx3-ubyte").read_bytes()[16:]
    labels = (FOLDER / f"{split}-labels-idx1-ubyte").read_bytes()[8:]
    images = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 8, 8)
    labels = torch.frombuffer(bytearray(labels), dtype=torch.uint8)
    return TensorDataset(images[:count].double() / 255, labels[:count].long())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


def train(name, make_optimizer, drop_last=False, accumulate=1):
    torch.manual_seed(SEED)  # the same weights on every rank
    model = DistributedDataParallel(Net().double(), bucket_cap_mb=0.05)
    torch.manual_seed(SEED + 1 + dist.get_rank())  # from here on only dropout draws numbers
    optimizer = make_optimizer(model.parameters())
    data = read("train", 501)  # odd: one rank has a sample more, or the last is left out
    sampler = DistributedSampler(data, seed=SEED, drop_last=drop_last)
    # A loader draws a number from its generator in each epoch, by default from the one of dropout.
    loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())

    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader, start=1):
            averaged = step % accumulate == 0
            with contextlib.nullcontext() if averaged else model.no_sync():
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / accumulate).backward()
            if averaged:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    report(name, model, losses)


def report(name, model, losses):
    """Rank 0 prints each step's losses, of both ranks; its loss on the test images; its buckets' bytes."""
    images, labels = read("t10k", 100).tensors
    model.eval()
    with torch.no_grad():
        tested = nn.functional.cross_entropy(model.module(images), labels)
    losses = torch.stack(losses)
    gathered = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, losses)
    if dist.get_rank() == 0:
        for step, row in enumerate(torch.stack(gathered, 1).tolist()):
            print(f"{name}: step {step}:", *row)
        print(f"{name}: test:", tested.item())
        print(f"{name}: buckets:", *model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", "))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train("sgd", sgd)
    train("adam, drop_last", adam, drop_last=True)
    train("sgd, 2 passes a step", sgd, accumulate=2)
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
