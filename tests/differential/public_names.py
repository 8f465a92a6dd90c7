#!/usr/bin/env python3
"""Checks that each public name of the library is drawn by the generator of programs, or that options.txt says why not.

usage: public_names.py ROOT DIFFERENTIAL

A public name is an option (TORCH_ARG) or a member function, "Struct.name", or a function of the namespace. The
generator names what its programs call in `differential --list`: "name" or "Struct.name".
"""
import pathlib
import re
import subprocess
import sys

SKIPPED = {"if", "for", "while", "return", "sizeof", "static_assert", "decltype", "defined", "noexcept", "explicit"}


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.S)


def statements(text: str):
    """Yields (scopes, statement) for declarations; a scope is the text before its brace."""
    scopes, start = [], 0
    for at, c in enumerate(text):
        if c == "{":
            scopes.append(text[start:at].strip())
            yield scopes[:-1], scopes[-1]
            start = at + 1
        elif c == "}":
            scopes.pop()
            start = at + 1
        elif c == ";":
            yield list(scopes), text[start:at].strip()
            start = at + 1


def public_names(header: pathlib.Path) -> set:
    names = set()
    access = {}
    text = re.sub(r"^\s*#.*?(?<!\\)$", "", without_comments(header.read_text()), flags=re.M | re.S)
    for scopes, statement in statements(text):
        if any("namespace detail" in s or "namespace torch" in s or re.search(r"\boperator\b", s) for s in scopes):
            continue
        owner = ""
        inside_function = False
        for scope in scopes:
            match = re.search(r"\b(class|struct)\s+(?:DDP_API\s+|\[\[nodiscard\]\]\s+)*(\w+)(?!.*\()", scope)
            if match:
                owner = match.group(2)
                access.setdefault(owner, "private" if match.group(1) == "class" else "public")
            elif "namespace" not in scope and scope:
                inside_function = True
        if inside_function or owner.endswith("Impl") and owner[:-4] == "":
            continue
        for word in re.findall(r"\b(public|private|protected)\s*:", statement):
            access[owner] = word
        statement = re.sub(r"\b(public|private|protected)\s*:", "", statement).strip()
        option = re.match(r"TORCH_ARG\(.*,\s*(\w+)\)", statement, flags=re.S)
        if option:
            names.add(f"{owner}.{option.group(1)}")
            continue
        if owner and access.get(owner) != "public":
            continue
        if re.match(r"(using|typedef|friend|template\s*<[^;]*>\s*(class|struct)|class|struct|enum|TORCH_MODULE)\b", statement):
            continue
        function = re.match(r"[^=(]*?([A-Za-z_]\w*)\s*\(", statement, flags=re.S)
        if not function or function.group(1) in SKIPPED or "operator" in statement.split("(")[0]:
            continue
        name = function.group(1)
        if name in ("void", "move", "DDP_API") or name[0].isupper() and owner:  # of a constructor
            continue
        if name in (owner, owner.removesuffix("Impl")) or "~" in statement.split("(")[0]:
            continue
        names.add(f"{owner}.{name}" if owner else name)
    return names


def main() -> int:
    root, program = pathlib.Path(sys.argv[1]), sys.argv[2]
    public = set()
    for header in sorted(root.glob("*/include/ddp/*.h")):
        public |= public_names(header)
    if len(sys.argv) > 3:
        print("\n".join(sorted(public)))
        return 0
    drawn = set()
    for line in subprocess.run([program, "--list"], check=True, text=True, capture_output=True).stdout.splitlines():
        drawn |= set(line.split()[1:])
    undrawn = {}
    for number, line in enumerate((root / "tests/differential/options.txt").read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        names, _, reason = line.partition(": ")
        if not reason:
            print(f"options.txt:{number}: expected 'names: reason', got '{line}'")
            return 1
        undrawn.update(dict.fromkeys(names.split(), reason))
    last = {name.split("::")[-1] for name in drawn}
    covered = lambda name: name in last or name.split(".")[-1] in last
    problems = []
    for name in sorted(public):
        if not covered(name) and name not in undrawn and name.split(".")[0] + ".*" not in undrawn:
            problems.append(f"{name} is public, no choice draws it, and options.txt does not say why")
    owners = {name.split(".")[0] + ".*" for name in public}
    for name in sorted(undrawn):
        if name not in public and name not in owners:
            problems.append(f"options.txt has {name}, which is not public")
        elif covered(name) and not name.endswith(".*"):
            problems.append(f"options.txt has {name}, which a choice draws")
    short = {name.split(".")[-1] for name in public} | public
    types = set(re.findall(r"\b[A-Z]\w+", "".join(h.read_text() for h in root.glob("*/include/ddp/**/*.h"))))
    types |= {"save_on_host", "visit_tensors"}  # a class with a small letter, and a function of the user's
    for name in sorted(drawn):
        if name.split("::")[-1] not in short and name.split("::")[-1] not in types:
            problems.append(f"a choice draws {name}, which is not public")
    print("\n".join(problems) or f"{len(public)} public names, of which the generator draws {sum(map(covered, public))}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
