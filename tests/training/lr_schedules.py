# Steps each schedule in Python and lets lr_schedules_world print the same: every rate and momentum
# of 200 steps must be the same number. lr_schedules.py PROGRAM
import subprocess
import sys
import warnings

import torch
from torch.optim import lr_scheduler as schedulers

STEPS = 200
warnings.simplefilter("ignore")


def sgd():
    groups = [{"params": [torch.zeros(1)], "lr": 0.1}, {"params": [torch.zeros(1)], "lr": 0.037}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam():
    groups = [{"params": [torch.zeros(1)], "lr": 0.003}, {"params": [torch.zeros(1)], "lr": 0.0007}]
    return torch.optim.Adam(groups, lr=0.003)


def warm_up_and_cosine(o):
    warm_up = schedulers.LinearLR(o, start_factor=0.1, total_iters=7)
    cosine = schedulers.CosineAnnealingLR(o, T_max=60, eta_min=1e-4)
    return schedulers.SequentialLR(o, [warm_up, cosine], [7])


def three_in_another_order(o):
    steps = schedulers.MultiStepLR(o, [0, 3, 8], gamma=0.7)
    lam = schedulers.LambdaLR(o, lambda epoch: 0.95 ** epoch)
    warm_up = schedulers.LinearLR(o, start_factor=0.3, total_iters=9)
    return schedulers.SequentialLR(o, [warm_up, lam, steps], [10, 90])


def one_cycle_behind(o):
    warm_up = schedulers.LinearLR(o, total_iters=4)
    cycle = schedulers.OneCycleLR(o, max_lr=0.5, total_steps=250)
    return schedulers.SequentialLR(o, [warm_up, cycle], [20])


class Both:
    """Two schedules that are stepped one after the other."""

    def __init__(self, first, second):
        self.both = first, second

    def step(self):
        for scheduler in self.both:
            scheduler.step()


CASES = {
    "lambda": (sgd, lambda o: schedulers.LambdaLR(o, lambda epoch: 0.97 ** epoch)),
    "lambdas": (sgd, lambda o: schedulers.LambdaLR(
        o, [lambda epoch: 1 / (1 + epoch), lambda epoch: 0.9 ** (epoch // 10)])),
    "multi_step": (sgd, lambda o: schedulers.MultiStepLR(o, [30, 80, 80, 120], gamma=0.3)),
    "multi_step_at_0": (sgd, lambda o: schedulers.MultiStepLR(o, [0, 5])),
    "linear": (sgd, lambda o: schedulers.LinearLR(o)),
    "linear_down": (adam, lambda o: schedulers.LinearLR(
        o, start_factor=0.9, end_factor=0.05, total_iters=150)),
    "cosine": (sgd, lambda o: schedulers.CosineAnnealingLR(o, T_max=50)),
    "cosine_eta": (adam, lambda o: schedulers.CosineAnnealingLR(o, T_max=13, eta_min=1e-5)),
    "cosine_1": (sgd, lambda o: schedulers.CosineAnnealingLR(o, T_max=1, eta_min=0.01)),
    "one_cycle": (sgd, lambda o: schedulers.OneCycleLR(o, max_lr=0.4, total_steps=200)),
    "one_cycle_adam": (adam, lambda o: schedulers.OneCycleLR(
        o, max_lr=[0.01, 0.02], epochs=10, steps_per_epoch=23, pct_start=0.25,
        anneal_strategy="linear", three_phase=True, base_momentum=[0.8, 0.81], max_momentum=0.97,
        div_factor=10.0, final_div_factor=100.0)),
    "one_cycle_lr_only": (sgd, lambda o: schedulers.OneCycleLR(
        o, max_lr=0.4, total_steps=300, pct_start=0.0, cycle_momentum=False)),
    "warm_up_and_cosine": (sgd, warm_up_and_cosine),
    "three_in_another_order": (adam, three_in_another_order),
    "one_cycle_behind": (sgd, one_cycle_behind),
    "both": (sgd, lambda o: Both(
        schedulers.LinearLR(o, start_factor=0.2, total_iters=20),
        schedulers.MultiStepLR(o, [40, 100], gamma=0.1))),
}


def values(optimizer):
    momentum = [g["betas"][0] if "betas" in g else g["momentum"] for g in optimizer.param_groups]
    return [g["lr"] for g in optimizer.param_groups] + momentum


def expected():
    for name, (make_optimizer, make_scheduler) in CASES.items():
        optimizer = make_optimizer()
        scheduler = make_scheduler(optimizer)
        for step in range(STEPS + 1):
            yield name, step, values(optimizer)
            if step < STEPS:
                optimizer.step()
                scheduler.step()


def main(program):
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    got = {}
    for line in printed.splitlines():
        name, step, *numbers = line.split()
        got[name, int(step)] = [float(n) for n in numbers]
    differences = 0
    for name, step, numbers in expected():
        if got.pop((name, step), None) != numbers:
            differences += 1
            print(f"{name}, step {step}: expected {numbers}", file=sys.stderr)
    if got:
        print(f"not in Python: {sorted(got)[:5]}", file=sys.stderr)
    return 1 if differences or got else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
