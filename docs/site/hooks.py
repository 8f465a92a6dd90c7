"""Gives mkdocs the pages where they lie: README.md, docs/*.md and the others keep their places, so
that their links work in the site as in the repository. What they link to and is no page, source
files and folders, gets a page with its text; a public header is in the reference.
"""

import pathlib
import posixpath
import sys

from mkdocs.structure.files import File

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from pages import LINK, is_relative, lines_of_text, links, pages  # noqa: E402

PICTURES = ("benchmarks/plots/*.svg", "docs/*.svg")
LANGUAGES = {
    ".cpp": "cpp", ".h": "cpp", ".cmake": "cmake", ".py": "python", ".sh": "bash",
    ".sbatch": "bash", ".yaml": "yaml", ".txt": "cmake",
}  # fmt: skip


def on_files(files, config):
    have = set(pages(ROOT))
    for page in have:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    for picture in sorted(path for pattern in PICTURES for path in ROOT.glob(pattern)):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
        have.add(path)

    wanted = {
        target_of(page, link)
        for page in pages(ROOT)
        for _, link in links((ROOT / page).read_text(encoding="utf-8"))
    }
    sources = set()
    for path in wanted - have:
        if f"{path}/README.md" in have or is_public_header(path):
            continue
        if (ROOT / path).exists():
            sources |= {path, *(files_in(path) if (ROOT / path).is_dir() else ())}
    for path in sorted(sources):
        files.append(File.generated(config, source_page(path), content=source_text(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Sends links to what is no page to the page that shows it."""
    here = page.file.src_uri
    if here not in pages(ROOT):
        return markdown
    lines = markdown.splitlines()
    for number, line in lines_of_text(markdown):
        lines[number - 1] = LINK.sub(lambda link: f"]({shown_at(here, link[1], files)})", line)
    return "\n".join(lines) + "\n"


def shown_at(page, link, files):
    path = target_of(page, link)
    if not is_relative(link) or link.startswith("#") or files.get_file_from_path(path):
        return link
    if files.get_file_from_path(f"{path}/README.md"):
        return posixpath.relpath(f"{path}/README.md", posixpath.dirname(page))
    if is_public_header(path):
        # Doxygen's name for the header's page.
        name = posixpath.basename(path).replace("_", "__").replace(".", "_8")
        return posixpath.relpath(f"api/{name}.md", posixpath.dirname(page))
    return posixpath.relpath(source_page(path), posixpath.dirname(page))


def target_of(page, link):
    """What the link of a page is to, relative to the root; its #anchor is left out."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link.split("#")[0]))


def is_public_header(path):
    return posixpath.dirname(path).endswith("include/ddp") and path.endswith(".h")


def source_page(path):
    return f"source/{path}.md"


def files_in(folder):
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(p.relative_to(ROOT).as_posix() for p in found if p.suffix in LANGUAGES)


def source_text(path):
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if (ROOT / path).is_dir():
        names = (posixpath.relpath(file, path) for file in files_in(path))
        folder = posixpath.basename(path)
        return head + "".join(f"- [{name}]({folder}/{name}.md)\n" for name in names)
    language = LANGUAGES.get(pathlib.PurePath(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{head}````{language}\n{text}\n````\n"
