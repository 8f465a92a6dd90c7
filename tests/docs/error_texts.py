"""The error texts in the library's sources, and the rows of docs/debugging.md that explain them."""

import re

ROOMS = (
    "comm", "shard", "reducer", "sampler", "ddp", "data", "checkpoint", "training", "parallel", "launch")
SUFFIXES = (".h", ".cpp", ".cu")

TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | '(?:\\.|[^'\\])' | "(?:\\.|[^"\\\n])*" """, re.DOTALL | re.VERBOSE
)
# "new_group: expected ...", "backend shm: ...", "timeout(): ..."
SUBJECT = re.compile(r"((?:[A-Za-z_][\w:]*|shm: \w+)(?:\(\))?(?: [a-z]+)?): ")
# A constant that begins a text: `kName, ": expected ..."`, and its value.
CONSTANT = re.compile(r"\b(k[A-Z]\w*)(?:\[\])?\s*=\s*\"([\w:]+)\"")
NAMED = re.compile(r"\b(k[A-Z]\w*),\s*\"(?:::\w+)?: ")
# Texts that look like an error text and are none: usage, programs' names before texts, and a word
# within other texts.
NO_SUBJECTS = {"Usage", "ddp_consolidate", "ddprun", "ddprun: gave up"}


def sources(root):
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in SUFFIXES:
                yield path


def strings(text):
    """Yields line and value of every string literal; joins neighbours, as the compiler does."""
    whole, line, end = None, 0, 0
    for token in TOKEN.finditer(text):
        if not token[0].startswith('"'):
            continue
        value = token[0][1:-1].replace('\\"', '"')
        if whole is not None and not text[end : token.start()].strip():
            whole += value
        else:
            if whole is not None:
                yield line, whole
            whole, line = value, text.count("\n", 0, token.start()) + 1
        end = token.end()
    if whole is not None:
        yield line, whole


def subjects(root):
    """Returns the first place of every subject that an error text has, by subject."""
    found = {}
    names = {}
    texts = [(path.relative_to(root).as_posix(), path.read_text()) for path in sources(root)]
    for _, text in texts:
        names.update(CONSTANT.findall(text))
    for path, text in texts:
        for line, value in strings(text):
            subject = SUBJECT.match(value)
            if subject and subject[1] not in NO_SUBJECTS:
                found.setdefault(subject[1], f"{path}:{line}")
        for name in NAMED.finditer(text):
            if name[1] in names:
                line = text.count("\n", 0, name.start()) + 1
                found.setdefault(names[name[1]], f"{path}:{line}")
    return found


def explained(page):
    """Returns the texts between backticks in the first cells of the page's rows, by line."""
    found = {}
    begins = page.index("## Error texts")
    for number, line in enumerate(page.splitlines(), start=1):
        if number > page.count("\n", 0, begins) and line.startswith("| `"):
            for text in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                found.setdefault(text, number)
    return found


def unexplained(root):
    """Returns the subjects of error texts that have no row."""
    rows = explained((root / "docs/debugging.md").read_text())
    return [
        f'{place}: "{subject}:" has no row in docs/debugging.md'
        for subject, place in subjects(root).items()
        if not any(row.startswith(f"{subject}:") for row in rows)
    ]


def obsolete(root):
    """Returns the rows whose text is in no source."""
    rows = explained((root / "docs/debugging.md").read_text())
    have = {value for path in sources(root) for _, value in strings(path.read_text())}
    together = "\n".join(have)
    return [
        f"docs/debugging.md:{line}: no source has the text `{text}`"
        for text, line in rows.items()
        if text not in together and text.rstrip(":") not in have and not is_built(text, have)
    ]


def is_built(text, have):
    """Whether a text is made of two literals, a subject and a rule: `Reducer: a gradient ...`"""
    subject, separator, rule = text.partition(": ")
    return bool(separator) and any(v.startswith(f"{subject}: ") for v in have) and any(
        rule in v for v in have
    )
