"""What the pages of this repository are, and what links and headings a page has.

For the site (hooks.py) and for the test of the pages (tests/docs/pages_test.py).
"""

import re

PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "examples/**/*.md",
    "benchmarks/*.md",
)

# [text](target), and of a picture; not the target's title, which no page has.
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"\s*(`{3,}|~{3,})")


def pages(root):
    """Returns the paths of all pages, relative to the repository's root, with slashes."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    return sorted(path.relative_to(root).as_posix() for path in found)


def lines_of_text(text):
    """Yields the number of each line that is no code, and the line."""
    fence = None
    for number, line in enumerate(text.splitlines(), start=1):
        begins = FENCE.match(line)
        if fence:
            if begins and begins[1].startswith(fence) and not line.strip(" `~"):
                fence = None
        elif begins:
            fence = begins[1]
        elif not line.startswith("    "):
            yield number, line


def without_code(line):
    """The line with blanks in place of what is between backticks."""
    return re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), line)


def is_relative(target):
    return not re.match(r"[a-z]+:", target)


def links(text):
    """Yields line number and target of every relative link."""
    for number, line in lines_of_text(text):
        for link in LINK.finditer(without_code(line)):
            if is_relative(link[1]):
                yield number, link[1]


def headings(text):
    return [line for _, line in lines_of_text(text) if re.match(r"#{1,6} ", line)]


def anchors(text):
    """The anchors of a page's headings, as GitHub names them."""
    found = set()
    for heading in headings(text):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.lstrip("#").strip())
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchor, count = name, 0
        while anchor in found:
            count += 1
            anchor = f"{name}-{count}"
        found.add(anchor)
    return found
