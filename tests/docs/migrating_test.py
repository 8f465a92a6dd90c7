"""docs/migrating.md has a row for every argument and method of the installed torch's
DistributedDataParallel, and for every name of its tensor parallelism.
usage: migrating_test.py <the repository>
"""

import inspect
import pathlib
import re
import sys

import torch
import torch.distributed.tensor.parallel
from torch.nn.parallel import DistributedDataParallel


def first_cells(page, section):
    text = page[page.index(f"### {section}\n") :]
    rows = re.findall(r"^\|(.*?) \|", text[: text.find("\n### ")], re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def main():
    if not torch.__version__.startswith("2.11."):
        print(f"skipped: no Python has torch 2.11, got {torch.__version__}")
        return
    page = (pathlib.Path(sys.argv[1]) / "docs/migrating.md").read_text()
    arguments = first_cells(page, "Constructor arguments")
    faults = []
    signature = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, argument in list(signature.items())[1:]:
        default = "" if argument.default is argument.empty else f"={argument.default}"
        if name + default not in arguments:
            faults.append(f"constructor argument {name}{default}")
    faults += [f"no such argument: {a}" for a in arguments if a.split("=")[0] not in signature]

    methods = {re.sub(r"\W.*", "", name) for name in first_cells(page, "Methods and attributes")}
    public = [name for name in vars(DistributedDataParallel) if not name.startswith("_")]
    faults += [f"method {name}" for name in public if name not in methods]

    cells = first_cells(page, "Meshes, tensor and context parallel")
    words = {word for cell in cells for word in re.findall(r"\w+", cell)}
    styles = [*torch.distributed.tensor.parallel.__all__, "context_parallel"]
    faults += [f"torch.distributed.tensor: {name}" for name in styles if name not in words]
    assert len(signature) > 10 and len(public) > 5 and len(styles) > 5

    if faults:
        sys.exit("docs/migrating.md: expected a row for each, got none:\n" + "\n".join(faults))
    print(f"migrating.md: {len(signature) - 1} arguments, {len(public)} methods, {len(styles)} styles")


main()
