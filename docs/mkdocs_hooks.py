"""Makes the site hold what the pages link to: the pages of the root, and other files as they are.

The pages are written for the repository, where `../examples/five-lines.yaml` is a link like any other, but
MkDocs knows the folder `docs` only. `on_files` therefore adds the files of the repository that pages link to,
and `on_page_markdown` turns their links to where they are in the site. A link to nothing is a warning, which
fails a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LOG = logging.getLogger("mkdocs.hooks.repository")
ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, and where they are in the site."""

DECISIONS = "docs/decisions"
ELSEWHERE = "repository/"
"""Folder of the site that holds linked files from outside `docs`, pages among them."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def source_of(page_uri: str) -> str:
    """Path in the repository of a page of the site."""
    back = {uri: name for name, uri in PAGES.items()}
    if page_uri.startswith(ELSEWHERE):
        return page_uri.removeprefix(ELSEWHERE)
    return back.get(page_uri, f"docs/{page_uri}")


def target_of(link: str, source: str) -> str:
    """Path in the repository of a relative link that stands on the page `source`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def place_of(path: str) -> str:
    """Path in the site of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path == DECISIONS:
        return "decisions/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{ELSEWHERE}{path}"


def decisions() -> str:
    """A page that lists the decisions with their titles."""
    lines = [
        "# Decisions",
        "",
        "Why moesim is built as it is: context, decision, alternatives, consequences.",
        "",
    ]
    for page in sorted((ROOT / DECISIONS).glob("*.md")):
        title = page.read_text("utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({page.name})")
    return "\n".join(lines)


def elsewhere(texts: Mapping[str, str]) -> set[str]:
    """Files outside `docs` that pages link to."""
    linked = {target_of(link, source) for source, text in texts.items() for _, link, _ in LINK.findall(text)}
    return {path for path in linked if place_of(path).startswith(ELSEWHERE) and (ROOT / path).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the list of decisions, and the linked files outside `docs`."""
    texts = {source_of(file.src_uri): file.content_string for file in files.documentation_pages()}
    for name, uri in PAGES.items():
        texts[name] = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, uri, content=texts[name]))
    files.append(File.generated(config, place_of(DECISIONS), content=decisions()))
    every_key = runpy.run_path(str(ROOT / "lab" / "writers" / "key_tables.py"))["every_key"]
    files.append(File.generated(config, "scenario-keys.md", content=every_key()))
    added = set[str]()
    while new := sorted(elsewhere(texts) - added):
        added.update(new)
        for path in new:
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                texts[path] = (ROOT / path).read_text("utf-8")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside `docs`, and those of the root's pages, to their places in the site."""
    source = source_of(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        path = target_of(match[2], source)
        if not (ROOT / path).exists() and path != f"{DECISIONS}/index.md":
            LOG.warning("%s links to %s, which does not exist", source, match[2])
        here = posixpath.dirname(page.file.src_uri)
        return f"{match[1]}{posixpath.relpath(place_of(path), here or '.')}{match[3]}"

    return LINK.sub(turned, markdown)
