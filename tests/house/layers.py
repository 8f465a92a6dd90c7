"""Finds includes of comm that point up the list of CONTRIBUTING.md, and folders with too many files."""

import collections
import pathlib
import re

MOST_FILES = 25  # beside each other in a folder
ROOMS = (
    "comm", "shard", "reducer", "sampler", "ddp", "data", "checkpoint", "training", "parallel", "launch",
    "plan")

# Headers for other rooms or for users, of which no folder has a source of the same name.
FOLDER_OF = {
    "address": "membership",
    "backend": "backends",
    "check": "base",
    "collective_backend": "calls",
    "collectives_with_group": "collectives",
    "current_stream": "device",
    "elastic_errors": "base",
    "export": "base",
    "fd": "base",
    "gradient_memory": "backends",
    "groups": "group",
    "hash": "base",
    "inter_host_timer": "base",
    "optimizer_time": "base",
    "host": "base",
    "launchers": "base",
    "light_work": "backends",
    "line_channel": "membership",
    "lines": "membership",
    "owner_process": "base",
    "pretended": "pretend",
    "process_group_options": "base",
    "process_signs": "base",
    "random_streams": "base",
    "rank_list": "base",
    "ranges": "base",
    "reform": "membership",
    "start_thread": "base",
    "text": "base",
    "variables": "base",
}

# What is not the library: its files may be of any size, and are users.
NOT_ROOMS = ("tests/", "benchmarks/", "examples/", "build/")


def folders_of(contributing):
    """comm's folders in the order of the table below that heading, lowest first."""
    table = contributing.split("| folder of `comm` |", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.M)


def includes_of(path):
    return re.findall(r'^#include ["<]([\w/]+\.h)[">]', path.read_text(), re.M)


class Comm:
    def __init__(self, root):
        self.room = pathlib.Path(root) / "comm"
        self.order = folders_of((pathlib.Path(root) / "CONTRIBUTING.md").read_text())
        self.files = sorted(p for p in self.room.rglob("*") if p.suffix in (".h", ".cpp"))
        self.folder_of = dict(FOLDER_OF)
        for path in self.files:
            first = path.relative_to(self.room).parts[0]
            if path.suffix == ".cpp" and first in self.order:
                self.folder_of.setdefault(path.stem, first)

    def folder(self, path):
        """None: in no folder of the list."""
        first = path.relative_to(self.room).parts[0]
        if first in ("include", "internal"):
            return self.folder_of.get(path.stem)
        return first if first in self.order else None

    def target(self, include):
        """The folder of what is included; None: not of comm."""
        for place in ("include", "internal", "."):
            path = self.room / place / include
            if path.exists():
                return self.folder(path)
        return None

    def faults(self):
        for path in self.files:
            name = path.relative_to(self.room.parent)
            own = self.folder(path)
            if own is None:
                yield f"{name} is in no folder of CONTRIBUTING.md's list"
                continue
            for include in includes_of(path):
                target = self.target(include)
                if target and self.order.index(target) > self.order.index(own):
                    yield f"{name} ({own}) includes {include} ({target}), which is above it"


def crowded(root):
    for room in ROOMS:
        counts = collections.Counter(
            p.parent for p in (pathlib.Path(root) / room).rglob("*") if p.is_file()
        )
        for folder, count in sorted(counts.items()):
            if count > MOST_FILES:
                yield f"{folder.relative_to(root)} has {count} files, {MOST_FILES} at most"


# A comment that leaves out its subject.
NO_SUBJECT = re.compile(r"^[ \t]*//+ (What|That|Those|Whose|Who|Of) .*", re.M)


def without_subject(root):
    """Comments of private code that begin with a pronoun in place of what they are about."""
    for room in ROOMS:
        for path in sorted((pathlib.Path(root) / room).rglob("*.*")):
            if path.suffix not in (".h", ".cpp", ".cu") or "include" in path.parts:
                continue
            text = path.read_text()
            for match in NO_SUBJECT.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path.relative_to(root)}:{line}: {match.group().strip()}"


# c10d's virtual methods of collectives, as an override begins.
METHODS = re.compile(
    r"\b(?:broadcast|allreduce\w*|reduce|_?allgather\w*|gather|scatter|_?reduce_scatter\w*|alltoall\w*"
    r"|DDP_\w+_SINGLE)\(\s*[^;{}]*Options\b[^;{}]*\)\s*override"
)
ONLY_IN = "comm/include/ddp/collective_backend.h"


def spelled_out(root):
    """Classes that override c10d's collectives one by one."""
    for room in (*ROOMS, "tests", "benchmarks", "examples"):
        for path in sorted((pathlib.Path(root) / room).rglob("*.*")):
            name = str(path.relative_to(root))
            if path.suffix in (".h", ".cpp", ".cu") and name != ONLY_IN:
                for match in METHODS.finditer(path.read_text()):
                    method = match.group().split("(")[0]
                    yield f"{name} overrides {method}(): derive from Uniform of {ONLY_IN}, and override run()"


def ill_sized(root):
    """Yields the files of rooms with more than 500 lines, and the small private headers, with their source, of one user."""
    sources = [path for pattern in ("*.h", "*.cpp") for path in root.glob(f"*/**/{pattern}")
               if (root / path.relative_to(root).parts[0] / "CMakeLists.txt").exists() or path.is_relative_to(root / "tests")]
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in sources}
    rooms = {name: text for name, text in texts.items() if not name.startswith(NOT_ROOMS)}
    users = {}
    for name, text in texts.items():
        for included in re.findall(r'#include [<"]([^">]+)[">]', text):
            users.setdefault(included.split("/")[-1], set()).add(name)
    for name, text in sorted(rooms.items()):
        lines = text.count("\n")
        if lines > 500:
            yield f"{name} has {lines} lines, 500 at most"
        if not name.endswith(".h") or "/include/" in name or "/shim/" in name:
            continue
        own = name.removesuffix(".h") + ".cpp"
        of_name = users.get(name.split("/")[-1], set())
        others = {user for user in of_name if user.split("/")[-1] != own.split("/")[-1]}
        room = name.split("/")[0] + "/"
        lines += next((text.count("\n") for n, text in rooms.items()
                       if n.startswith(room) and n.split("/")[-1] == own.split("/")[-1]), 0)
        if lines < 60 and len(others) < 2:
            yield f"{name} has {lines} lines with its source, and {len(others)} user; 60, or a second user"
