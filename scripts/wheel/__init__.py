"""DistributedDataParallel for LibTorch: a C++ library, which a Python package carries. See `python -m ddp --help`."""

import os
import sys

cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))


def missing_torch():
    """Says what to do where LibTorch's wheel is not beside this one; else None."""
    folder = os.path.dirname(cmake_prefix_path)
    if os.path.isdir(os.path.join(folder, "torch", "lib")):
        return None
    return (f"ddp: expected LibTorch's wheel beside this one, in {folder}, got none. Install both into one folder by "
            "one pip, without --no-deps")


def _become(program):
    path = os.path.join(cmake_prefix_path, "bin", program)
    os.execv(path, [path, *sys.argv[1:]])


# The programs on PATH. Each replaces Python by itself at once, with the same process id.
def ddprun():
    _become("ddprun")


def ddp_plan():
    _become("ddp_plan")


def ddp_consolidate():
    if missing_torch():
        sys.exit(missing_torch())
    _become("ddp_consolidate")
