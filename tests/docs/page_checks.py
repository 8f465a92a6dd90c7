"""Checks of the pages of this repository. Each check returns faults, one a line."""

import posixpath
import re

from pages import FENCE, anchors, lines_of_text, links, pages

LONGEST = 120
CODE = re.compile(r"`([^`]+)`")
FENCED = re.compile(r"^```c\+\+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def broken_links(root):
    """Checks that relative links lead to a file or folder, and #anchors to a heading."""
    faults = []
    for page in pages(root):
        for line, link in links((root / page).read_text()):
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path or "."))
            target = root / (target if path else page)
            if not target.exists() or not target.resolve().is_relative_to(root.resolve()):
                faults.append(f"{page}:{line}: {link} leads nowhere")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                faults.append(f"{page}:{line}: {link}: no heading has this anchor")
    return faults


def unreachable_pages(root):
    """Checks that links from README.md lead to every page, directly or over other pages."""
    reached, to_follow = set(), ["README.md"]
    while to_follow:
        page = to_follow.pop()
        if page in reached or not (root / page).is_file():
            continue
        reached.add(page)
        for _, link in links((root / page).read_text()):
            path = posixpath.normpath(
                posixpath.join(posixpath.dirname(page), link.partition("#")[0])
            )
            # A forge shows the README of a folder.
            to_follow += [path] if path.endswith(".md") else [f"{path}/README.md"]
    return [f"{page}: no link from README.md leads here" for page in set(pages(root)) - reached]


def faults_of_navigation(root):
    """Checks that the site's navigation names every existing page once, and no other."""
    text = (root / "docs/site/mkdocs.yml").read_text()
    named = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    named = [page for page in named if not page.startswith("api/")]
    have = pages(root)
    faults = [f"{page}: expected once in docs/site/mkdocs.yml" for page in have
              if named.count(page) != 1]  # fmt: skip
    return faults + [f"docs/site/mkdocs.yml: {page} is not there" for page in named
                     if page not in have]  # fmt: skip


def stale_copies(root):
    """Checks that the program in getting_started.md equals the example's."""
    copies = FENCED.findall((root / "docs/getting_started.md").read_text())
    original = (root / "examples/minimal/main.cpp").read_text()
    if copies != [original]:
        return ["docs/getting_started.md: its program is not examples/minimal/main.cpp"]
    return []


def unlisted_headers(root):
    """Checks that docs/reference.md names every public header."""
    named = {target for _, target in links((root / "docs/reference.md").read_text())}
    headers = (path.relative_to(root).as_posix() for path in root.glob("*/include/ddp/*.h"))
    # The page begins with the header that includes all others.
    return [
        f"{header}: has no row in docs/reference.md"
        for header in headers
        if f"../{header}" not in named and header != "ddp/umbrella/include/ddp/ddp.h"
    ]


def unknown_names(root):
    """Checks that docs/find.md names what public headers, or the programs, have."""
    sources = [*root.glob("*/include/ddp/*.h"), *root.glob("launch/*.cpp")]
    for folder in ("launch", "plan", "benchmarks"):
        sources += root.glob(f"{folder}/**/CMakeLists.txt")
    known = "".join(path.read_text() for path in sources)
    faults = []
    for number, line in enumerate((root / "docs/find.md").read_text().splitlines(), 1):
        if not line.startswith("| ") or line.startswith("| word |"):
            continue
        word, here = (cell.strip() for cell in line.split("|")[1:3])
        names = CODE.findall(here)
        if here.startswith("the same"):
            names += [name for name in CODE.findall(word) if name not in names]
        for name in names:
            others = name.startswith(("at::", "torch::")) or f"`{name}` is" in here
            parts = [] if others else re.findall(r"\w{2,}", name)
            faults += [f"docs/find.md:{number}: no public header has {part}" for part in parts
                       if part not in known]  # fmt: skip
    return faults


def long_lines(root):
    """Checks that lines of prose have at most 120 characters; tables and code may be longer."""
    return [
        f"{page}:{number}: {len(line)} characters, more than {LONGEST}"
        for page in pages(root)
        for number, line in lines_of_text((root / page).read_text())
        if len(line) > LONGEST and not line.startswith("|")
    ]


def open_fences(root):
    """Checks that every block of code ends: otherwise the other checks skip the rest of the page."""
    return [
        f"{page}: a block of code does not end"
        for page in pages(root)
        if sum(bool(FENCE.match(line)) for line in (root / page).read_text().splitlines()) % 2
    ]
