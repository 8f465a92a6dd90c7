# The program that fully_sharded.cpp ports, by torch.distributed.fsdp.fully_shard, on two ranks:
# torchrun --standalone --nproc-per-node 2 fully_sharded.py
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu

SEED = 5
STEPS = 10
VOCABULARY, LENGTH, WIDTH, BLOCKS = 23, 12, 14, 3
NUMBER = {torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # as LibTorch counts dtypes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        inner = self.up(self.norm(x))
        self.seen = [x.dtype, self.up.weight.dtype, inner.dtype]
        return x + self.down(gelu(inner))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_rank(number):
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    numbers[dist.get_rank()] = number
    dist.all_reduce(numbers)
    return numbers.tolist()


def train(name, dtype, reshard, policy, make_optimizer, max_norm=None):
    torch.manual_seed(SEED)
    model = Model().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = make_optimizer(model.parameters())
    text = torch.arange(LENGTH * 4).view(4, LENGTH)
    for step in range(STEPS):
        tokens = (text * 7 + step + 3 * dist.get_rank()) % VOCABULARY
        target = (tokens * 5 + 1) % VOCABULARY
        optimizer.zero_grad()
        logits = model(tokens)
        loss = cross_entropy(logits.to(dtype).flatten(0, 1), target.flatten())
        loss.backward()
        norms = []
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor().item())
        optimizer.step()
        losses = by_rank(loss.item())
        if dist.get_rank() == 0:
            print(f"{name}: step {step}:", *losses, flush=True)
            if norms:
                print(f"{name}: norm {step}:", *norms, flush=True)
    dtypes = [*model.blocks[0].seen, logits.dtype]
    for parameter in (model.blocks[0].up.weight, model.head.bias):
        dtypes += [parameter.dtype, parameter.grad.dtype]
    if dist.get_rank() == 0:
        print(f"{name}: dtypes:", *[NUMBER[dtype] for dtype in dtypes], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(
        "AdamW",
        torch.float64,
        reshard=True,
        policy=MixedPrecisionPolicy(),
        make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        max_norm=0.5,
    )
    train(
        "SGD, kept whole",
        torch.float64,
        reshard=False,
        policy=MixedPrecisionPolicy(),
        make_optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    )
    train(
        "bfloat16",
        torch.float32,
        reshard=True,
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
