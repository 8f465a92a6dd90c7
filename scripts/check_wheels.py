"""Checks that the wheels in a virtual environment are as pip installed them.

check_wheels.py VENV         prints what is wrong with a sealed VENV, or nothing
check_wheels.py --seal VENV  writes VENV/torch-dir: the mark of a finished installation

The first line of VENV/torch-dir is the Torch_DIR for CMake; each other line is a distribution
that must be there: LibTorch and the nvidia libraries it loads. Sizes are compared, not checksums:
it has to be fast enough for every build, and what it is for are installations that were cut off
or partly deleted.
"""

import csv
import os
import pathlib
import sys


def site_packages(venv):
    found = list(venv.glob("lib/python3*/site-packages"))
    if len(found) != 1:
        sys.exit(f"expected one site-packages folder in {venv}, found {len(found)}")
    return found[0]


def first_fault(venv):
    """Returns what is wrong with a sealed venv in a few words, or None."""
    torch_dir, *distributions = (venv / "torch-dir").read_text().splitlines()
    if not os.path.exists(os.path.join(torch_dir, "TorchConfig.cmake")):
        return "TorchConfig.cmake is missing"
    packages = site_packages(venv)
    for distribution in distributions:
        record = packages / distribution / "RECORD"
        if not record.exists():
            return f"{distribution} is missing"
        with record.open(newline="") as rows:
            for path, _, size in csv.reader(rows):
                # A build reads no Python files, and pip records no size for what it made itself.
                if not size or path.endswith(".py"):
                    continue
                try:
                    actual = os.stat(packages / path).st_size
                except FileNotFoundError:
                    return f"{path} is missing"
                if actual != int(size):
                    return f"{path} has {actual} bytes instead of {size}"
    return None


def seal(venv):
    packages = site_packages(venv)
    lines = [str(packages / "torch/share/cmake/Torch")]
    for wheels in ("torch-*.dist-info", "nvidia_*.dist-info"):
        lines += sorted(path.name for path in packages.glob(wheels))
    unfinished = venv / "torch-dir.tmp"
    unfinished.write_text("\n".join(lines) + "\n")
    unfinished.replace(venv / "torch-dir")


def main():
    if sys.argv[1] == "--seal":
        venv = pathlib.Path(sys.argv[2])
        seal(venv)
        fault = first_fault(venv)
        if fault:
            (venv / "torch-dir").unlink()
            sys.exit(f"{venv}: {fault}")
    else:
        print(first_fault(pathlib.Path(sys.argv[1])) or "", end="")


main()
