# The program that transformer_block.cpp ports, by torch.distributed.tensor.parallel, on two ranks:
# torchrun --standalone --nproc-per-node 2 transformer_block.py
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

SEED = 5
STEPS = 10
VOCABULARY, LENGTH, BATCH, WIDTH, HEADS = 24, 8, 3, 16, 4


class Attention(nn.Module):
    """The weights that nn.MultiheadAttention draws, in a layer each, because it cuts no fused one."""

    def __init__(self):
        super().__init__()
        whole = nn.MultiheadAttention(WIDTH, HEADS)
        rows = [*whole.in_proj_weight.split(WIDTH), whole.out_proj.weight]
        biases = [*whole.in_proj_bias.split(WIDTH), whole.out_proj.bias]
        for name, weight, bias in zip(("q", "k", "v", "out"), rows, biases):
            layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias)
            setattr(self, name, layer)

    def forward(self, x):
        def heads_of(t):
            return t.unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3)

        q, k, v = heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.permute(2, 0, 1, 3).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.embedding(tokens))))


TENSOR_PARALLEL = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
    "block.attention.out": RowwiseParallel(),
    "block.up": ColwiseParallel(),
    "block.down": RowwiseParallel(),
    "head": ColwiseParallel(use_local_output=False),
}
SEQUENCE_PARALLEL = {
    **TENSOR_PARALLEL,
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    **{
        name: SequenceParallel(sequence_dim=0, use_local_output=True)
        for name in ("block.norm1", "block.norm2", "norm")
    },
    "block.attention": PrepareModuleInput(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    "block.attention.out": RowwiseParallel(output_layouts=Shard(0)),
    "block.up": ColwiseParallel(input_layouts=Shard(0)),
    "block.down": RowwiseParallel(output_layouts=Shard(0)),
    "head": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
}


def train(name, plan):
    torch.manual_seed(SEED)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Model().double(), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    text = torch.arange(LENGTH * BATCH).view(LENGTH, BATCH)
    for step in range(STEPS):
        tokens = (text * 7 + step) % VOCABULARY
        target = (tokens * 5 + 1) % VOCABULARY
        optimizer.zero_grad()
        with loss_parallel():
            loss = cross_entropy(model(tokens).flatten(0, 1), target.flatten())
            loss.backward()
        optimizer.step()
        whole = loss.full_tensor().item()
        if dist.get_rank() == 0:
            print(f"{name}: step {step}:", whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train("tensor parallel", TENSOR_PARALLEL)
    train("sequence parallel", SEQUENCE_PARALLEL)
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort an interpreter that ends while they run.
    sys.stdout.flush()
    os._exit(0)
