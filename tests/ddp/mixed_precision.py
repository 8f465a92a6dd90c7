# Compares MixedPrecision with the same arithmetic in Python, to the bit: two ranks' losses, and the
# parameters after six steps. Python's own wrapper needs an accelerator: on a CPU its first step reads
# freed memory. mixed_precision.py DDPRUN PROGRAM FOLDER
import pathlib
import subprocess
import sys

import torch

RANKS = 2
CASES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]  # parameters, reduction
SCALE = 1024  # of the loss: half loses bits of what is smaller than 6e-5


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 64)
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.LayerNorm(64)
        self.fc1 = torch.nn.Linear(4 * 64, 32)
        self.fc2 = torch.nn.Linear(32, 10)
        self.fc1.bias.requires_grad_(False)

    def forward(self, x, tokens):
        x = self.norm(x + self.embedding(tokens))
        x = torch.relu(self.conv(x.view(-1, 1, 8, 8)))
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


def one_rank(net, step, rank, dtype):
    """The loss, and the gradients in low precision."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(8, 64, generator=generator)
    tokens = torch.randint(11, (8,), generator=generator)
    y = torch.randint(10, (8,), generator=generator)
    low = {n: p.detach().to(dtype).requires_grad_(p.requires_grad) for n, p in net.named_parameters()}
    output = torch.func.functional_call(net, low, (x.to(dtype), tokens))
    loss = torch.nn.functional.cross_entropy(output.float(), y)
    (loss * SCALE).backward()
    return loss.item(), {n: p.grad for n, p in low.items()}


def train(net, param_dtype, reduce_dtype):
    """What Python's wrapper computes: gradients are summed and divided in reduce_dtype."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = [[] for _ in range(RANKS)]
    for step in range(6):
        gradients = []
        for rank in range(RANKS):
            loss, found = one_rank(net, step, rank, param_dtype)
            losses[rank].append(f"{loss:.9g}")
            gradients.append(found)
        for name, p in net.named_parameters():
            if p.requires_grad:
                p.grad = (sum(g[name].to(reduce_dtype) for g in gradients) / RANKS).float() / SCALE
        optimizer.step()
    return losses


def compare(case, folder, ddprun, program):
    torch.manual_seed(3)
    net = Net()
    torch.save(net.state_dict(), folder / "start.pt")
    expected = train(net, *(getattr(torch, name) for name in case))
    command = [str(word) for word in (ddprun, "-n", RANKS, program, *case, folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"FAILED: {command} ended with {result.returncode}: {result.stderr}")
    for rank in range(RANKS):
        prefix = f"[{rank}] "
        got = [line[len(prefix) :] for line in result.stdout.splitlines() if line.startswith(prefix)]
        if got != expected[rank]:
            sys.exit(f"FAILED: {case}, losses of rank {rank}: expected {expected[rank]}, got {got}")
    ours = torch.load(folder / "ours.pt")
    for name, tensor in net.state_dict().items():
        if ours[name].dtype != torch.float32 or not torch.equal(tensor, ours[name]):
            off = (tensor - ours[name].float()).abs().max()
            sys.exit(f"FAILED: {case}: {name} is off by {off}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ddprun, program, root = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    for i, case in enumerate(CASES):
        folder = root / str(i)
        folder.mkdir()
        compare(case, folder, ddprun, program)
    print("the same losses and parameters as Python's")
