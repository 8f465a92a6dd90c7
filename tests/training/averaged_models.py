# Averages a model in Python and lets averaged_models_world average the same values: all tensors must
# have the same bits, and each side continues from the other's file. averaged_models.py PROGRAM FOLDER
import subprocess
import sys
import warnings

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

STEPS = 9
MIDDLE = 4
warnings.simplefilter("ignore")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.bn = torch.nn.BatchNorm1d(4)
        self.tied = torch.nn.Linear(3, 4)
        self.tied.weight = self.fc.weight
        self.low = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.wide = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(3))

    def forward(self, x):
        return self.bn(self.fc(x))


class Batches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(5):
            self.register_buffer(f"b{i}", torch.randn(4 + i, 3))


def in_warm_up(averages, values, n):
    decay = min(0.99, (1 + n.item()) / (10 + n.item()))
    get_ema_multi_avg_fn(decay)(averages, values, n)


CASES = {
    "swa": {},
    "ema": dict(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "warmup": dict(multi_avg_fn=in_warm_up),
    "swa_buffers": dict(use_buffers=True),
    "ema_buffers": dict(multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True),
}


def write_steps(folder):
    torch.manual_seed(1)
    net = Net()
    for step in range(STEPS + 1):
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                values = torch.randn(tensor.shape, dtype=torch.float64)
                tensor.copy_(values if tensor.is_floating_point() else values * 100)
        torch.save(net.state_dict(), f"{folder}/step{step}.pt")
    torch.save(Batches().state_dict(), f"{folder}/batches.pt")


def average(folder, name, steps, averaged=None):
    net = Net()
    net.load_state_dict(torch.load(f"{folder}/step0.pt", weights_only=True))
    if averaged is None:
        averaged = AveragedModel(net, **CASES[name])
    for step in steps:
        net.load_state_dict(torch.load(f"{folder}/step{step}.pt", weights_only=True))
        averaged.update_parameters(net)
    return averaged


def difference(expected, got):
    if sorted(expected) != sorted(got):
        return f"names {sorted(expected)} and {sorted(got)}"
    unlike = [n for n in expected if expected[n].dtype != got[n].dtype or not torch.equal(expected[n], got[n])]
    return ", ".join(f"{n}: {expected[n].tolist()} and {got[n].tolist()}" for n in unlike)


def main(program, folder):
    write_steps(folder)
    first, second = range(1, MIDDLE + 1), range(MIDDLE + 1, STEPS + 1)
    for name in CASES:
        torch.save(average(folder, name, first).state_dict(), f"{folder}/{name}.python.pt")
    subprocess.run([program, folder], check=True)
    differences = []

    def report(name, states):
        for what, pair in states.items():
            unlike = difference(*pair)
            if unlike:
                differences.append(name)
                print(f"{name}, {what}: {unlike}", file=sys.stderr)

    for name in CASES:
        fresh = average(folder, name, [])
        fresh.load_state_dict(torch.load(f"{folder}/{name}.middle.pt", weights_only=True))
        averaged = average(folder, name, first)
        report(name, {"middle": (averaged.state_dict(), fresh.state_dict())})
        averaged, fresh = average(folder, name, second, averaged), average(folder, name, second, fresh)
        ours = torch.load(f"{folder}/{name}.end.pt", weights_only=True)
        report(name, {"end": (averaged.state_dict(), ours), "from ours": (averaged.state_dict(), fresh.state_dict())})
        batches = Batches()
        batches.load_state_dict(torch.load(f"{folder}/batches.pt", weights_only=True))
        update_bn(batches.buffers(), averaged)
        ours = torch.load(f"{folder}/{name}.bn.pt", weights_only=True)
        report(name, {"update_bn": (averaged.state_dict(), ours)})
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
