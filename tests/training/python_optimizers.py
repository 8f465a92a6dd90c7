# Steps each optimizer in Python and lets python_optimizers_world print the same: parameters must agree
# within 1e-12 in double. Lion and LAMB, which Python lacks, are beside the formulas of their papers.
# python_optimizers.py PROGRAM
import itertools
import sys

import torch

from printed_runs import runs_of, whole_numbers

STEPS = 50
DTYPES = {"double": (torch.float64, 1e-12), "float": (torch.float32, 5e-6)}


class Formula(torch.optim.Optimizer):
    """An optimizer of a function of parameter, gradient, state and options."""

    def __init__(self, groups, update, **options):
        super().__init__(groups, options)
        self.update = update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["t"] = state.get("t", 0) + 1
                    state.setdefault("m", torch.zeros_like(p))
                    state.setdefault("v", torch.zeros_like(p))
                    self.update(p, p.grad, state, group, *group["betas"])


# Chen et al., 2023, algorithm 2.
def lion(x, g, state, o, beta1, beta2):
    c = beta1 * state["m"] + (1 - beta1) * g
    x -= o["lr"] * (c.sign() + o["weight_decay"] * x)
    state["m"] = beta2 * state["m"] + (1 - beta2) * g


# You et al., 2020, algorithm 2, with the identity as phi.
def lamb(x, g, state, o, beta1, beta2):
    state["m"] = beta1 * state["m"] + (1 - beta1) * g
    state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
    m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
    update = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * x
    norms = x.norm(), update.norm()
    x -= o["lr"] * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * update


def formula(update):
    return lambda groups, **options: Formula(groups, update, **options)


often = dict(lr=0.02, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.1)
CASES = {
    "nadam": (torch.optim.NAdam, dict()),
    "nadam_decay": (torch.optim.NAdam, dict(often, momentum_decay=0.01)),
    "nadam_decoupled": (torch.optim.NAdam, dict(often, decoupled_weight_decay=True)),
    "radam": (torch.optim.RAdam, dict()),
    "radam_decay": (torch.optim.RAdam, often),
    "radam_decoupled": (torch.optim.RAdam, dict(often, decoupled_weight_decay=True)),
    "adamax": (torch.optim.Adamax, dict()),
    "adamax_decay": (torch.optim.Adamax, often),
    "adadelta": (torch.optim.Adadelta, dict()),
    "adadelta_decay": (torch.optim.Adadelta, dict(lr=0.5, rho=0.8, eps=1e-5, weight_decay=0.1)),
    "muon": (torch.optim.Muon, dict()),
    "muon_rms": (torch.optim.Muon, dict(
        lr=0.02, weight_decay=0.01, momentum=0.9, nesterov=False, ns_coefficients=(3.0, -3.2, 1.2), eps=1e-5,
        ns_steps=3, adjust_lr_fn="match_rms_adamw")),
    "lion": (formula(lion), dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0)),
    "lion_decay": (formula(lion), dict(lr=0.02, betas=(0.8, 0.97), weight_decay=0.1)),
    "lamb": (formula(lamb), dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)),
    "lamb_decay": (formula(lamb), often),
}


def steps_of(make, options, dtype):
    parameters = [whole_numbers(a * b, 37, 5, 101).view(a, b).to(dtype) for a, b in ((6, 4), (4, 9), (1, 5))]
    parameters[2].zero_()
    optimizer = make([dict(params=parameters[:2]), dict(params=parameters[2:], lr=0.03)], **options)
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            p.grad = whole_numbers(p.numel(), 53, 29 * step + i, 97).view(p.shape).to(dtype)
        if step in (1, 2):
            parameters[1].grad = None
        optimizer.step()
        yield step, list(itertools.chain(*(p.double().flatten().tolist() for p in parameters)))


def main(program):
    got = {key: [float.fromhex(n) for n in numbers] for key, numbers in runs_of(program, 3).items()}
    failures = 0
    for (name, (make, options)), (label, (dtype, bound)) in itertools.product(CASES.items(), DTYPES.items()):
        worst = 0.0
        for step, expected in steps_of(make, options, dtype):
            numbers = got.pop((name, label, str(step)), [])
            assert len(numbers) == len(expected), (name, label, step)
            worst = max([worst, *(abs(a - b) / max(1, abs(b)) for a, b in zip(numbers, expected, strict=True))])
        if not worst <= bound:
            failures += 1
            print(f"{name} {label}: {worst:.3g} from Python's", file=sys.stderr)
    if got:
        print(f"not in Python: {sorted(got)[:5]}", file=sys.stderr)
    return 1 if failures or got else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1]))
