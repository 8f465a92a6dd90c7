# Compares a program in C++ with the one in Python that it ports, each on two separate processes:
# the same losses within 1e-9 (1e-2 in bfloat16), in the same buckets. same_losses.py DDPRUN PROGRAM PYTHON SCRIPT
# ARGUMENTS..., where PYTHON is scripts/python_with_torch.sh.
import subprocess
import sys

RANKS = 2
ddprun, program, python, script, *arguments = sys.argv[1:]


def tolerance_of(key):
    return 1e-2 if "bfloat16" in key else 1e-9


def run(*command):
    """The numbers in each line that rank 0 prints, by what is before them: "sgd: step 3"."""
    command = [str(word) for word in command]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 77:
        sys.exit("skipped: no Python has torch")
    if result.returncode != 0:
        sys.exit(f"FAILED: {command} ended with {result.returncode}: {result.stdout}{result.stderr}")
    lines = [line.removeprefix("[0] ").rsplit(": ", 1) for line in result.stdout.splitlines()]
    return {key: [float(number) for number in numbers.split()] for key, numbers in lines}


ours = run(ddprun, "-n", RANKS, program, *arguments)
pythons = run(ddprun, "-n", RANKS, python, script, *arguments)

if list(ours) != list(pythons):
    sys.exit(f"FAILED: expected lines for {list(pythons)}, got {list(ours)}")
for key, expected in pythons.items():
    got, most = ours[key], tolerance_of(key)
    if len(got) != len(expected) or not all(abs(a - b) <= most for a, b in zip(got, expected)):
        sys.exit(f"FAILED: {key}: expected {expected} within {most}, got {got}")

# The comparison only counts if training made progress, and differently for each name.
names = {key.split(":")[0] for key in pythons}
steps = {name: [v for k, v in pythons.items() if k.startswith(f"{name}: step")] for name in names}
for name, losses in steps.items():
    assert max(losses[-1]) < min(losses[0]) / 1.5, f"{name} did not learn: {losses}"
    if f"{name}: buckets" not in pythons:
        continue  # not data parallel
    assert all(a != b for a, b in losses), f"{name}: both ranks had the same samples"
    assert len(pythons[f"{name}: buckets"]) > 1, f"{name}: expected several buckets"
    others = [losses for other, losses in steps.items() if other != name]
    assert all(losses[-1] != other[-1] for other in others), f"expected different ways: {steps}"
worst = max(abs(a - b) for key in pythons for a, b in zip(ours[key], pythons[key]))
print(f"{sum(map(len, steps.values()))} steps: at most {worst:.1e} from Python's")
