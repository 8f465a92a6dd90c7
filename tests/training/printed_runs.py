# Runs that a program prints, a line each: the words of a key, and then numbers.
import subprocess

import torch


def runs_of(program, words):
    """The numbers, as they are printed, by the words of their keys."""
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    runs = {}
    for line in printed.splitlines():
        *key, numbers = line.split(maxsplit=words)
        runs[tuple(key)] = numbers.split()
    return runs


def whole_numbers(count, factor, shift, modulus):
    """Values that float, half and bfloat16 have without rounding."""
    return torch.tensor([(i * factor + shift) % modulus - modulus // 2 for i in range(count)]).double() / 32
