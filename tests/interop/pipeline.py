# The program that pipeline.cpp ports, by torch.distributed.pipelining, on two ranks:
# torchrun --standalone --nproc-per-node 2 pipeline.py
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.functional import cross_entropy, gelu

SEED = 5
STEPS = 8
VOCABULARY, LENGTH, WIDTH, BLOCKS = 23, 12, 14, 4
MICROBATCHES, ROWS, MAX_NORM = 4, 8, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """The blocks of a stage, between the embedding and the head where it is the first or the last."""

    def __init__(self, embedding, blocks, head):
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleList(blocks), head

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def stage_of(index, stages):
    """Draws the whole model on every rank, and returns a part of it."""
    torch.manual_seed(SEED)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    blocks = [Block() for _ in range(BLOCKS)]
    head = nn.Linear(WIDTH, VOCABULARY)
    own = BLOCKS // stages
    return Stage(
        embedding if index == 0 else None,
        blocks[index * own : (index + 1) * own],
        head if index + 1 == stages else None,
    ).double()


def shapes_of(index, stages):
    """What a stage gets and returns of a micro-batch: so Python does not send shapes, which needs
    numpy."""
    rows = ROWS // MICROBATCHES
    hidden = torch.zeros(rows, LENGTH, WIDTH, dtype=torch.float64)
    logits = torch.zeros(rows, LENGTH, VOCABULARY, dtype=torch.float64)
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64)
    return {
        "input_args": (tokens if index == 0 else hidden,),
        "output_args": (logits if index + 1 == stages else hidden,),
    }


def over_stages(number):
    total = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def loss_of(logits, target):
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def train(name, schedule_type, chunks, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    indices = [chunk * ranks + rank for chunk in range(chunks)]
    modules = [stage_of(index, chunks * ranks) for index in indices]
    stages = [
        PipelineStage(
            module, index, chunks * ranks, torch.device("cpu"), **shapes_of(index, chunks * ranks)
        )
        for module, index in zip(modules, indices)
    ]
    schedule = schedule_type(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=loss_of)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = make_optimizer(parameters)
    text = torch.arange(LENGTH * ROWS).view(ROWS, LENGTH)
    for step in range(STEPS):
        tokens = (text * 7 + step) % VOCABULARY
        target = (tokens * 5 + 1) % VOCABULARY
        optimizer.zero_grad()
        losses = []
        inputs = (tokens,) if rank == 0 else ()
        if rank + 1 == ranks:
            schedule.step(*inputs, target=target, losses=losses)
        else:
            schedule.step(*inputs)
        norm = over_stages(sum(p.grad.pow(2).sum().item() for p in parameters)) ** 0.5
        for p in parameters:
            p.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
        optimizer.step()
        loss = over_stages(sum(loss.item() for loss in losses) / MICROBATCHES)
        if rank == 0:
            print(f"{name}: step {step}: {loss}", flush=True)
            print(f"{name}: norm {step}: {norm}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sgd = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)
    adamw = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)
    train("GPipe", ScheduleGPipe, 1, adamw)
    train("1F1B", Schedule1F1B, 1, sgd)
    train("interleaved", ScheduleInterleaved1F1B, 2, adamw)
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
