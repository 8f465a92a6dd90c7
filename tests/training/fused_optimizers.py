# Steps each fused optimizer in Python and lets fused_optimizers_world print the same: parameters and
# gradients must have the same bits on the CPU. fused_optimizers.py PROGRAM
import itertools
import sys

import torch

from printed_runs import runs_of, whole_numbers

STEPS = 7
DTYPES = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}
CASES = {
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adamw_amsgrad": (torch.optim.AdamW, dict(lr=0.01, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.1, amsgrad=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01)),
    "adam_amsgrad": (torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.1, amsgrad=True)),
    "sgd": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.01)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
    "adagrad_decay": (torch.optim.Adagrad, dict(
        lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5)),
}


def steps_of(make, options, dtype, scaled):
    parameters = [whole_numbers(count, 37, 5, 101).to(dtype) for count in (5, 130, 1)]
    optimizer = make([dict(params=parameters[:2]), dict(params=parameters[2:], lr=0.03)], fused=True, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled=scaled)
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            gradient = whole_numbers(p.numel(), 53, 29 * step + i, 97).to(dtype)
            p.grad = scaler.scale(gradient)
            if step == 4 and i == 1:
                p.grad[7] = float("inf")
        if step in (1, 2):
            parameters[1].grad = None
        if scaled and step == 3:
            scaler.unscale_(optimizer)
        if scaled or step != 4:
            scaler.step(optimizer)
        scaler.update()
        yield step, scaler.get_scale(), [p.double().tolist() for p in parameters]


def expected():
    for (name, (make, options)), dtype, scaled in itertools.product(CASES.items(), DTYPES, (False, True)):
        # Where momentum is dampened, Python's found_inf leaves the first step's momentum undefined.
        if scaled and (dtype == "half" or "dampening" in options):
            continue
        for step, scale, values in steps_of(make, options, DTYPES[dtype], scaled):
            numbers = [scale, *itertools.chain(*values)]
            yield (name, dtype, str(int(scaled)), str(step)), [x.hex() for x in numbers]


def main(program):
    got = {key: [float.fromhex(n).hex() for n in numbers] for key, numbers in runs_of(program, 4).items()}
    differences = 0
    for key, numbers in expected():
        if got.pop(key, None) != numbers:
            differences += 1
            print(f"{key}: expected {numbers[:8]}...", file=sys.stderr)
    if got:
        print(f"not in Python: {sorted(got)[:5]}", file=sys.stderr)
    return 1 if differences or got else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1]))
