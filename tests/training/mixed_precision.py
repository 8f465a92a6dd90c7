# Compares GradScaler and autocast with Python's: the same scales, skipped steps, losses and
# gradients, to the last digit. mixed_precision.py PROGRAM FOLDER
import pathlib
import random
import subprocess
import sys

import torch

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
torch.set_num_threads(1)


def run(*arguments, text=""):
    result = subprocess.run([program, *map(str, arguments)], input=text, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"FAILED: {arguments} ended with {result.returncode}: {result.stderr}")
    return result.stdout.splitlines()


def compare(what, ours, expected):
    for line, (got, want) in enumerate(zip(ours, expected)):
        if got != want:
            sys.exit(f"FAILED: {what}, line {line}: expected {want}, got {got}")
    if len(ours) != len(expected):
        sys.exit(f"FAILED: {what}: expected {len(expected)} lines, got {len(ours)}")


def draw_events(seed):
    """Gradients of two optimizers, and now and then a scale set by hand."""
    draw = random.Random(seed)
    for _ in range(300):
        kinds = ["0.25", "-3.5", "1e-3"] * 8 + ["inf", "nan", "-inf"]
        yield draw.choice(kinds), draw.choice(kinds), "512" if draw.random() < 0.02 else "-", draw.random() < 0.3


def scaler_in_python(events, init_scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    parameters = [torch.zeros(3), torch.zeros(3)]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
    for first, second, new_scale, unscales in events:
        steps = []
        for p, optimizer, value in zip(parameters, optimizers, (first, second)):
            p.grad = scaler.scale(torch.tensor([1.0, float(value), 2.0]) * 0.001)
            if unscales:
                scaler.unscale_(optimizer)
            before = p.clone()
            scaler.step(optimizer)
            steps.append(int(not torch.equal(before, p)))
        if new_scale == "-":
            scaler.update()
        else:
            scaler.update(float(new_scale))
        values = " ".join(f"{x:.9g}" for p in parameters for x in p.tolist())
        yield f"{scaler.get_scale():.9g} {scaler._get_growth_tracker()} {steps[0]} {steps[1]} {values}"


for seed, init_scale in ((1, 65536.0), (2, 3e38), (3, 7.5)):
    events = list(draw_events(seed))
    text = "\n".join(" ".join(map(str, (a, b, n, int(u)))) for a, b, n, u in events) + "\n"
    expected = list(scaler_in_python(events, init_scale))
    assert sum(" 0 " in line for line in expected) > 10, "no step was skipped"
    compare(f"scales, seed {seed}", run("scales", init_scale, text=text), expected)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.LayerNorm(64)
        self.fc1 = torch.nn.Linear(4 * 64, 32)
        self.fc2 = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.conv(self.norm(x.view(-1, 1, 64)).view(-1, 1, 8, 8)))
        return self.fc2(torch.softmax(self.fc1(x.flatten(1)), 1))


def train(dtype, scales):
    torch.manual_seed(3)
    net = Net()
    torch.save(net.state_dict(), folder / "net.pt")
    scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 64, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            output = net(x)
            loss = torch.nn.functional.cross_entropy(output, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False).item()
        scaler.step(optimizer)
        scaler.update()
        yield f"{loss.item():.9g} {norm:.9g} {scaler.get_scale():.9g} {str(output.dtype)[6:]} {str(loss.dtype)[6:]}"


for name, dtype, scales in (("bfloat16", torch.bfloat16, False), ("float16", torch.float16, True)):
    expected = list(train(dtype, scales))
    compare(f"training in {name}", run("train", name, int(scales), folder / "net.pt"), expected)
print("the same scales, steps and losses as Python's")
