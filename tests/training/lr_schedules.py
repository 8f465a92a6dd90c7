# Steps each schedule in Python and lets lr_schedules_world print the same: every rate and momentum
# of 200 steps must be the same number. lr_schedules.py PROGRAM
import sys
import warnings

import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from printed_runs import runs_of

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


class InTurns:
    """Steps one schedule for 40 steps, and another one from then on."""

    def __init__(self, first, second):
        self.both, self.steps = (first, second), 0

    def step(self):
        self.both[self.steps >= 40].step()
        self.steps += 1


class ByFractions:
    """Steps by the epoch, of seven batches."""

    def __init__(self, scheduler):
        self.scheduler, self.steps = scheduler, 0

    def step(self):
        self.steps += 1
        if self.steps % 10 == 0:
            self.scheduler.step()
        else:
            self.scheduler.step(self.steps / 7)


def chained(o):
    warm_up = schedulers.ConstantLR(o, factor=0.1, total_iters=12)
    decay = schedulers.ExponentialLR(o, gamma=0.98)
    return schedulers.ChainedScheduler([warm_up, decay], optimizer=o)


def chained_from_base(o):
    decay = schedulers.PolynomialLR(o, total_iters=150, power=0.7)
    warm_up = schedulers.LinearLR(o, start_factor=0.2, total_iters=6)
    cosine = schedulers.CosineAnnealingLR(o, T_max=20, eta_min=1e-4)
    return schedulers.ChainedScheduler([warm_up, cosine, decay])


def chained_and_set(o):
    decay = schedulers.ExponentialLR(o, gamma=0.9)
    lam = schedulers.LambdaLR(o, lambda epoch: 0.5 + 1 / (2 + epoch))
    return schedulers.ChainedScheduler([lam, decay])


def chained_around_sequence(o):
    warm_up = schedulers.ConstantLR(o, factor=0.5, total_iters=100)
    steps = schedulers.MultiStepLR(o, [5, 60], gamma=0.3)
    both = schedulers.SequentialLR(o, [warm_up, steps], [40])
    decay = schedulers.MultiplicativeLR(o, lambda epoch: 0.99)
    return schedulers.ChainedScheduler([both, decay])


def sequence_of_new(o):
    all_of_them = [
        schedulers.ConstantLR(o, factor=0.3, total_iters=4),
        schedulers.ExponentialLR(o, gamma=0.93),
        schedulers.ConstantLR(o, factor=0.25, total_iters=6),
        schedulers.PolynomialLR(o, total_iters=30, power=2.0),
        schedulers.MultiplicativeLR(o, lambda epoch: 1 + 1 / (1 + epoch)),
        schedulers.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=1e-5),
        SWALR(o, swa_lr=0.02, anneal_epochs=7),
    ]
    return schedulers.SequentialLR(o, all_of_them, [8, 20, 34, 60, 70, 120])


def cycle_behind(o):
    warm_up = schedulers.LinearLR(o, total_iters=4)
    cycle = schedulers.CyclicLR(o, base_lr=0.01, max_lr=[0.3, 0.2], step_size_up=9)
    return schedulers.SequentialLR(o, [warm_up, cycle], [20])


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


CASES.update({
    "constant": (sgd, lambda o: schedulers.ConstantLR(o)),
    "constant_long": (adam, lambda o: schedulers.ConstantLR(o, factor=0.7, total_iters=100)),
    "exponential": (sgd, lambda o: schedulers.ExponentialLR(o, gamma=0.97)),
    "polynomial": (sgd, lambda o: schedulers.PolynomialLR(o)),
    "polynomial_power": (adam, lambda o: schedulers.PolynomialLR(o, total_iters=150, power=2.3)),
    "multiplicative": (sgd, lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95 + 0.001 * epoch)),
    "multiplicative_groups": (adam, lambda o: schedulers.MultiplicativeLR(
        o, [lambda epoch: 1 - 1 / (2 + epoch), lambda epoch: 0.9 if epoch % 30 == 0 else 1.0])),
    "chained": (sgd, chained),
    "chained_from_base": (adam, chained_from_base),
    "chained_and_set": (sgd, chained_and_set),
    "chained_around_sequence": (sgd, chained_around_sequence),
    "sequence_of_new": (sgd, sequence_of_new),
    "restarts": (sgd, lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=13)),
    "restarts_longer": (adam, lambda o: schedulers.CosineAnnealingWarmRestarts(
        o, T_0=5, T_mult=3, eta_min=1e-5)),
    "restarts_by_fractions": (sgd, lambda o: ByFractions(
        schedulers.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2))),
    "restarts_by_fractions_alike": (sgd, lambda o: ByFractions(
        schedulers.CosineAnnealingWarmRestarts(o, T_0=4))),
    "cyclic": (sgd, lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.3, step_size_up=17)),
    "cyclic_adam": (adam, lambda o: schedulers.CyclicLR(
        o, base_lr=[1e-4, 2e-4], max_lr=[1e-2, 3e-2], step_size_up=11, step_size_down=23,
        mode="triangular2", base_momentum=[0.7, 0.75], max_momentum=0.93)),
    "cyclic_range": (sgd, lambda o: schedulers.CyclicLR(
        o, base_lr=0.001, max_lr=0.1, step_size_up=20, mode="exp_range", gamma=0.99)),
    "cyclic_function": (sgd, lambda o: schedulers.CyclicLR(
        o, base_lr=0.001, max_lr=0.1, step_size_up=10, step_size_down=0, cycle_momentum=False,
        scale_fn=lambda x: 1 / (3 + x))),
    "cyclic_function_of_step": (sgd, lambda o: schedulers.CyclicLR(
        o, base_lr=0.001, max_lr=0.1, step_size_up=10, scale_fn=lambda x: 1 / (3 + x),
        scale_mode="iterations")),
    "cycle_behind": (sgd, cycle_behind),
    "swa": (sgd, lambda o: SWALR(o, swa_lr=0.05)),
    "swa_linear": (adam, lambda o: SWALR(
        o, swa_lr=[0.001, 0.002], anneal_epochs=33, anneal_strategy="linear")),
    "swa_at_once": (sgd, lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=0)),
    "swa_behind": (sgd, lambda o: InTurns(
        schedulers.ExponentialLR(o, gamma=0.97), SWALR(o, swa_lr=0.05, anneal_epochs=15))),
    "swa_beside": (sgd, lambda o: Both(
        schedulers.ExponentialLR(o, gamma=0.99), SWALR(o, swa_lr=0.05, anneal_epochs=60))),
})


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
    got = {key: [float(n) for n in numbers] for key, numbers in runs_of(program, 2).items()}
    differences = 0
    for name, step, numbers in expected():
        if got.pop((name, str(step)), None) != numbers:
            differences += 1
            print(f"{name}, step {step}: expected {numbers}", file=sys.stderr)
    if got:
        print(f"not in Python: {sorted(got)[:5]}", file=sys.stderr)
    return 1 if differences or got else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
