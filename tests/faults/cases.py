"""The cases of the fault matrix, and the selection for a run."""

import dataclasses
import hashlib
import itertools
import random

RANKS = 3
PHASES = (
    "before", "constructor", "forward", "backward", "collective", "pipeline", "gather",
    "reduction", "join", "between", "save", "destroy",
)
FAULTS = ("kill", "segv", "exit", "throw", "stop")
VICTIMS = (0, RANKS - 1)
TRANSPORTS = ("shm", "gloo", "hosts")
LAUNCHERS = ("ddprun", "plain", "torchrun")


@dataclasses.dataclass(frozen=True)
class Case:
    phase: str
    fault: str
    victim: int
    transport: str
    launcher: str

    def name(self):
        return f"{self.phase}/{self.fault}/rank{self.victim}/{self.transport}/{self.launcher}"


def all_cases():
    """Returns all cases in a fixed order, in which neighbours differ."""
    cases = [Case(*c) for c in itertools.product(PHASES, FAULTS, VICTIMS, TRANSPORTS, LAUNCHERS)]
    random.Random(21).shuffle(cases)
    return cases


def part_of(cases, number, parts):
    """Returns the part with that number, from 1."""
    if not 1 <= number <= parts:
        raise ValueError(f"--part: expected a number from 1 to {parts}, got {number}")
    return cases[number - 1 :: parts]


def drawn_by(text, parts):
    """Returns the number of the part that `text`, such as a commit's name, selects."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % parts + 1
