# TorchScript modules that Python made, trained by this library and by Python's wrapper on two ranks:
# the same losses within 1e-6, and Python loads what this library saved.
# scripted.py DDPRUN PROGRAM FOLDER; each rank of Python's runs scripted.py rank NET FOLDER.
import pathlib
import subprocess
import sys

import torch

RANKS, STEPS = 2, 6


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(width)
        self.conv2 = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = torch.nn.Sequential(Residual(8), Residual(8))
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x):
        x = self.blocks(self.stem(x.view(-1, 1, 8, 8)))
        return self.head(x.mean(dim=[2, 3]))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.encoder(self.up(x.view(-1, 8, 8))).mean(dim=1))


NETS = {"resnet": ResNet, "transformer": Transformer}


def train(name, folder):
    """One of Python's ranks."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    net = torch.jit.load(folder / f"{name}.pt")
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 64, generator=generator, dtype=torch.double)
        y = torch.randint(10, (6,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} {step} {rank}: {loss.item():.12g}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), folder / f"{name}.python.pt")
    torch.distributed.destroy_process_group()


def losses(*command):
    command = [str(word) for word in command]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"FAILED: {command} ended with {result.returncode}: {result.stdout}{result.stderr}")
    lines = [line.partition("] ")[2].rsplit(": ", 1) for line in result.stdout.splitlines()]
    return {key: float(number) for key, number in lines}


def compare(name, ddprun, program, folder):
    torch.manual_seed(1)
    torch.jit.script(NETS[name]().double()).save(folder / f"{name}.pt")
    ours = losses(ddprun, "-n", RANKS, program, name, folder)
    pythons = losses(ddprun, "-n", RANKS, sys.executable, __file__, "rank", name, folder)
    assert len(pythons) == RANKS * STEPS, pythons
    assert ours.keys() == pythons.keys(), (ours, pythons)
    worst = max(abs(ours[key] - pythons[key]) for key in pythons)
    assert worst < 1e-6, (ours, pythons)
    assert pythons[f"{name} 0 0"] != pythons[f"{name} 0 1"], "both ranks had the same samples"

    trained = torch.jit.load(folder / f"{name}.out.pt").state_dict()
    expected = torch.load(folder / f"{name}.python.pt")
    start = torch.jit.load(folder / f"{name}.pt").state_dict()
    assert trained.keys() == expected.keys(), (trained.keys(), expected.keys())
    for key, value in expected.items():
        assert torch.allclose(trained[key], value, rtol=0, atol=1e-6), key
        assert not torch.equal(trained[key], start[key]), f"{key} was not trained"
    print(f"{name}: losses at most {worst:.1e} from Python's, and {len(expected)} tensors equal")


if sys.argv[1] == "rank":
    train(sys.argv[2], pathlib.Path(sys.argv[3]))
else:
    for net in NETS:
        compare(net, *sys.argv[1:3], pathlib.Path(sys.argv[3]))
