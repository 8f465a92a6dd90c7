"""A page of Markdown with pictures, and the files that scripts/bench_growth.sh leaves."""

import json
import textwrap


def read(path):
    return path.read_text().strip() if path.exists() else ""


def read_lines(folder):
    """The records of all of a folder's *.jsonl, in the order of the files' names."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def link_folders(results):
    """(Gbit/s, folder) of each link that was measured, the slowest first."""
    rated = [(float(f.name.removeprefix("link_")), f) for f in results.glob("link_*")]
    return sorted((rate, folder) for rate, folder in rated if any(folder.glob("*.jsonl")))


class Page:
    def __init__(self, output):
        self.output = output
        self.parts = []

    def text(self, words):
        self.parts.append(words)

    def paragraph(self, words):
        """Adds a paragraph; wraps it, because the figures in it change its length."""
        self.text(textwrap.fill(words, 104, break_long_words=False, break_on_hyphens=False))

    def picture(self, name, drawing, alternative):
        (self.output / "plots").mkdir(parents=True, exist_ok=True)
        name = f"growth_{name}"
        (self.output / "plots" / name).write_text(drawing)
        self.parts.append(f"![{alternative}](plots/{name})")

    def write(self, name):
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / name).write_text("\n\n".join(part for part in self.parts if part) + "\n")
