"""DistributedDataParallel for LibTorch: a C++ library, which a Python package carries. See `python -m ddp --help`."""

import os
import sys

cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))


def _become(program):
    path = os.path.join(cmake_prefix_path, "bin", program)
    os.execv(path, [path, *sys.argv[1:]])


# The programs on PATH. Each replaces Python by itself at once, with the same process id.
def ddprun():
    _become("ddprun")


def ddp_plan():
    _become("ddp_plan")


def ddp_consolidate():
    _become("ddp_consolidate")
