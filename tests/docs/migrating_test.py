"""docs/migrating.md has a row for every argument and method of the installed torch's
DistributedDataParallel, and for every name of its tensor parallelism and of its sharded models.
usage: migrating_test.py <the repository>
"""

import inspect
import pathlib
import re
import sys

import torch
import torch.distributed.tensor.parallel
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel


def first_cells(page, section):
    """Returns the names in a table's first column, without those that a later torch brought: `x` (2.13)."""
    text = page[page.index(f"### {section}\n") :]
    rows = re.findall(r"^\|(.*?) \|", text[: text.find("\n### ")], re.MULTILINE)
    rows = [re.sub(r"`[^`]+` \(2\.(?:1[2-9]|[2-9]\d)\)", "", row) for row in rows]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def words_of(page, section):
    cells = first_cells(page, section)
    return {word for cell in cells for word in re.findall(r"\w+", cell)}


def sharded_names():
    """Returns arguments, fields and methods of FSDP2 and FSDP1."""
    names = {"fully_shard", "register_fsdp_forward_method", "share_comm_ctx"}
    for function in (fsdp.fully_shard, fsdp.MixedPrecisionPolicy, fsdp.FullyShardedDataParallel):
        names |= set(inspect.signature(function).parameters)
    for kind in (fsdp.FSDPModule, fsdp.FullyShardedDataParallel):
        names |= {name for name in vars(kind) if not name.startswith("_")}
    return sorted(names | set(fsdp.ShardingStrategy.__members__))


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

    words = words_of(page, "Meshes, tensor and context parallel")
    styles = [*torch.distributed.tensor.parallel.__all__, "context_parallel"]
    faults += [f"torch.distributed.tensor: {name}" for name in styles if name not in words]
    words, sharded = words_of(page, "Fully sharded models"), sharded_names()
    faults += [f"torch.distributed.fsdp: {name}" for name in sharded if name not in words]
    assert len(signature) > 10 and len(public) > 5 and len(styles) > 5 and len(sharded) > 50

    if faults:
        sys.exit("docs/migrating.md: expected a row for each, got none:\n" + "\n".join(faults))
    print(
        f"migrating.md: {len(signature) - 1} arguments, {len(public)} methods, {len(styles)} styles, "
        f"{len(sharded)} names of sharded models"
    )


main()
