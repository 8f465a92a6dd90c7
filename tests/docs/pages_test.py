"""Checks the pages of this repository, and that each check finds its fault.

usage: pages_test.py <the repository>
"""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "docs/site"))

import error_texts
import page_checks
from pages import anchors


class ThisRepository(unittest.TestCase):
    def check(self, faults):
        self.assertEqual(faults, [], "\n" + "\n".join(faults))

    def test_links(self):
        self.check(page_checks.broken_links(ROOT))

    def test_every_page_is_reached(self):
        self.check(page_checks.unreachable_pages(ROOT))

    def test_navigation(self):
        self.check(page_checks.faults_of_navigation(ROOT))

    def test_copies(self):
        self.check(page_checks.stale_copies(ROOT))

    def test_headers(self):
        self.check(page_checks.unlisted_headers(ROOT))

    def test_names_of_words(self):
        self.check(page_checks.unknown_names(ROOT))

    def test_long_lines(self):
        self.check(page_checks.long_lines(ROOT))

    def test_fences(self):
        self.check(page_checks.open_fences(ROOT))

    def test_every_error_text_is_explained(self):
        # A search that finds no texts would find no faults.
        self.assertGreater(len(error_texts.subjects(ROOT)), 50)
        self.check(error_texts.unexplained(ROOT))

    def test_every_explained_text_is_there(self):
        self.check(error_texts.obsolete(ROOT))


class SmallRepository(unittest.TestCase):
    """A repository without a fault, and with each fault alone."""

    FILES = {
        "README.md": "# Top\n\n[a](docs/a.md#two-words) [minimal](examples/minimal)\n",
        "docs/a.md": "# A\n\n## Two, `words`\n\n[top](../README.md), [here](#a), "
        "[web](https://example.org/x#y)\n\n```\n[no link](nowhere.md)\n```\n"
        "`[nor](this.md)` [b](debugging.md)\n",
        "docs/getting_started.md": "# Start\n\n```c++\nint main() {}\n```\n",
        "docs/debugging.md": "# Debugging\n\n## Error texts\n\n[start](getting_started.md), "
        "[all](reference.md), [find](find.md)\n\n"
        "| the text has | cause | cure |\n|---|---|---|\n"
        "| `join:`, `Sampler:` | a | b |\n| `it has ended` | a | b |\n",
        "docs/reference.md": "# Reference\n\n[join.h](../ddp/include/ddp/join.h)\n",
        "docs/find.md": "# Find\n\n| word | here | page |\n|---|---|---|\n"
        "| `join`, uneven | the same; `uneven` is `join` | [A](a.md) |\n"
        "| leave | `at::leave`, `join()` | [A](a.md) |\n| hang |  | [A](a.md) |\n",
        "docs/site/mkdocs.yml": "hooks: [x.md]\nnav:\n  - Start:\n      - Top: README.md\n"
        "      - docs/a.md\n      - docs/getting_started.md\n      - docs/debugging.md\n"
        "      - docs/find.md\n"
        "      - docs/reference.md\n"
        "      - Classes: api/annotated.md\n",
        "examples/minimal/main.cpp": "int main() {}\n",
        "ddp/include/ddp/join.h": "void join();\n",
        "ddp/join.cpp": 'DDP_CHECK(ok, "join: expected "  // why\n  "input, got none.");\n'
        '// "comment: of no text"\nlog(\'"\', "it has ended");\n',
        "sampler/a.cpp": 'constexpr const char* kName = "Sampler";\n'
        'DDP_CHECK(ok, kName, ": expected one");\n',
    }
    CHECKS = (
        page_checks.broken_links,
        page_checks.unreachable_pages,
        page_checks.faults_of_navigation,
        page_checks.stale_copies,
        page_checks.unlisted_headers,
        page_checks.unknown_names,
        page_checks.long_lines,
        page_checks.open_fences,
        error_texts.unexplained,
        error_texts.obsolete,
    )

    # A file, a part of it and what stands there instead, and the one fault that this makes.
    EDITS = (
        ("docs/a.md", "[here](#a)", "[here](nowhere.md)",
         page_checks.broken_links, "docs/a.md:5: nowhere.md leads nowhere"),
        ("docs/a.md", "[here](#a)", "[here](../..)",
         page_checks.broken_links, "docs/a.md:5: ../.. leads nowhere"),
        ("README.md", "#two-words", "#three-words",
         page_checks.broken_links, "README.md:3: docs/a.md#three-words: no heading has this anchor"),
        ("docs/a.md", "(#a)", "(#b)",
         page_checks.broken_links, "docs/a.md:5: #b: no heading has this anchor"),
        ("docs/debugging.md", "[start](getting_started.md)", "start",
         page_checks.unreachable_pages, "docs/getting_started.md: no link from README.md leads here"),
        ("docs/site/mkdocs.yml", "      - docs/a.md\n", "",
         page_checks.faults_of_navigation, "docs/a.md: expected once in docs/site/mkdocs.yml"),
        ("docs/site/mkdocs.yml", "- docs/a.md\n", "- docs/a.md\n      - docs/a.md\n",
         page_checks.faults_of_navigation, "docs/a.md: expected once in docs/site/mkdocs.yml"),
        ("docs/site/mkdocs.yml", "- docs/a.md\n", "- docs/a.md\n      - docs/z.md\n",
         page_checks.faults_of_navigation, "docs/site/mkdocs.yml: docs/z.md is not there"),
        ("examples/minimal/main.cpp", "{}", "{ }",
         page_checks.stale_copies, "docs/getting_started.md: its program is not examples/minimal/main.cpp"),
        ("docs/find.md", "join()", "joins()",
         page_checks.unknown_names, "docs/find.md:6: no public header has joins"),
        ("docs/find.md", "| `join`,", "| `joins`,",
         page_checks.unknown_names, "docs/find.md:5: no public header has joins"),
        ("docs/a.md", "`[nor](this.md)`", "x" * 120,
         page_checks.long_lines, "docs/a.md:10: 138 characters, more than 120"),
        ("docs/debugging.md", "| `it has ended` | a | b |\n", "| `it has ended` | a | b |\n\n```\n",
         page_checks.open_fences, "docs/debugging.md: a block of code does not end"),
        ("docs/debugging.md", ", `Sampler:`", "",
         error_texts.unexplained, 'sampler/a.cpp:2: "Sampler:" has no row in docs/debugging.md'),
        ("ddp/join.cpp", "it has ended", "it goes on",
         error_texts.obsolete, "docs/debugging.md:10: no source has the text `it has ended`"),
    )  # fmt: skip

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for path, text in self.FILES.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def replace(self, path, old, new):
        text = (self.root / path).read_text()
        self.assertEqual(text.count(old), 1)
        (self.root / path).write_text(text.replace(old, new))

    def expect(self, check, *faults):
        for other in self.CHECKS:
            self.assertEqual(sorted(other(self.root)), sorted(faults) if other is check else [])

    def test_no_fault(self):
        self.expect(None)

    def test_every_edit_makes_its_fault(self):
        for path, old, new, check, fault in self.EDITS:
            with self.subTest(fault):
                whole = (self.root / path).read_text()
                self.replace(path, old, new)
                self.expect(check, fault)
                (self.root / path).write_text(whole)

    def test_error_text_without_row(self):
        self.replace("ddp/join.cpp", '"join: expected "', '"leave: expected "')
        self.replace("docs/debugging.md", "`join:`, ", "")
        self.expect(
            error_texts.unexplained, 'ddp/join.cpp:1: "leave:" has no row in docs/debugging.md'
        )


class Anchors(unittest.TestCase):
    def test_as_github_names_them(self):
        page = (
            "# Why a rank's `step()` waits: 2 reasons\n## A_b - c\n## A_b - c\n"
            "```\n# no heading\n```\n### [Linked](x.md) title\n"
        )
        self.assertEqual(
            anchors(page),
            {"why-a-ranks-step-waits-2-reasons", "a_b---c", "a_b---c-1", "linked-title"},
        )


unittest.main()
