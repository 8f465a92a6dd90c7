"""Says where the parts of the package are, for shells and CMake."""

import argparse
import os
import sys

import ddp


def main():
    parser = argparse.ArgumentParser(prog="python -m ddp", description=__doc__)
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--cmake-prefix-path", action="store_true",
                          help="the folder for CMAKE_PREFIX_PATH; find_package(ddp) finds LibTorch's wheel beside it")
    question.add_argument("--examples", action="store_true", help="the folder of the examples, a project of CMake")
    arguments = parser.parse_args()
    path = ddp.cmake_prefix_path
    if arguments.examples:
        path = os.path.join(path, "share", "ddp", "examples")
    if ddp.missing_torch():
        print(ddp.missing_torch(), file=sys.stderr)
    print(path)


if __name__ == "__main__":
    main()
