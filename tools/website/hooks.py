"""MkDocs: makes pages of the repository's documents, where they are, so that a link is right here and there.

Every file that a page links is part of the site, results and examples among them. The navigation follows the folders;
within one, pages are in the order in which its README links them.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
_ADDRESSES = {"RESHARDING_GUIDE.md": "guide/index.html", "docs/README.md": "documentation/index.html"}
_FOLDERS = {"Usage": "docs/usage", "Recipes": "docs/recipes", "Concepts": "docs", "Reference": "docs/reference"}
_PROJECT = (
    "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "examples/http/README.md", "benchmark/README.md",
)  # fmt: skip
_MERMAID = "assets/mermaid.min.js"
_MERMAID_FILE = Path(sys.prefix, "mermaid.min.js")  # in the site's environment
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
log = logging.getLogger("mkdocs.plugins.website")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by the documents of the repository and by what these link."""
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    documents = ["README.md", "RESHARDING_GUIDE.md", *_PROJECT, *_markdown_of("docs", "**/")]
    for uri in documents:
        file = _file(config, uri)
        if uri in _ADDRESSES or uri.startswith("docs/"):
            file.dest_uri = _ADDRESSES.get(uri, file.dest_uri.removeprefix("docs/"))
        if uri in _PROJECT:
            file.name = Path(file.dest_uri).parent.name  # else a README would be the index of all of them
        found.append(file)
    linked = {link for document in documents for link in _links(document)}
    for uri in sorted(linked.difference(documents)):
        if (REPOSITORY / uri).is_file():
            found.append(_file(config, uri))
    found.append(File.generated(config, "assets/site.css", abs_src_path=str(REPOSITORY / "tools/website/site.css")))
    if _MERMAID_FILE.exists():
        found.append(File.generated(config, _MERMAID, abs_src_path=str(_MERMAID_FILE)))
    else:
        log.info("%s is not there: pages with diagrams load mermaid from unpkg.com", _MERMAID_FILE)
    config.nav = _navigation()
    return found


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adds the blank line that Python-Markdown, unlike GitHub, needs between a paragraph and a list or a table.

    Pages that are alone in the navigation are shown without it.
    """
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        if not fenced and lines and _begins(line) and lines[-1].strip() and not _continues(lines[-1], line):
            lines.append("")
        fenced ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Loads mermaid, which is large, on pages with a diagram only, and from the site itself."""
    if 'class="mermaid"' not in output or not _MERMAID_FILE.exists():
        return output
    up = "../" * page.url.count("/")
    return output.replace("</head>", f'<script src="{up}{_MERMAID}"></script></head>', 1)


def _navigation() -> list[Any]:
    nav: list[Any] = [{"Home": "README.md"}, {"Guide": "RESHARDING_GUIDE.md"}]
    nav += [{title: _in_order(folder)} for title, folder in _FOLDERS.items() if _in_order(folder)]
    return [*nav, {"Results": _in_order("docs/results")}, {"Project": list(_PROJECT)}]


def _in_order(folder: str) -> list[str]:
    """Returns the documents of a folder: its README, those that this links, and then all others."""
    readme, there = f"{folder}/README.md", _markdown_of(folder)
    first = [readme, *_links(readme)] if readme in there else []
    return list(dict.fromkeys([*(uri for uri in first if uri in there), *there]))


def _markdown_of(folder: str, within: str = "") -> list[str]:
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / folder).glob(f"{within}*.md"))


def _links(uri: str) -> Iterable[str]:
    """Yields the files of the repository that a document links."""
    for target in _LINK.findall((REPOSITORY / uri).read_text()):
        path = (REPOSITORY / uri).parent.joinpath(target).resolve()
        if "://" not in target and path.is_relative_to(REPOSITORY):
            yield path.relative_to(REPOSITORY).as_posix()


def _file(config: MkDocsConfig, uri: str) -> File:
    return File.generated(config, uri, abs_src_path=str(REPOSITORY / uri))


def _begins(line: str) -> bool:
    """Whether a line begins a list or a table."""
    return re.match(r"\s*([-*] |\d+\. |\|)", line) is not None


def _continues(before: str, line: str) -> bool:
    """Whether the line before is of the same list or table."""
    if line.lstrip().startswith("|"):
        return before.lstrip().startswith("|")
    return _begins(before) or before.startswith(" ") or before.startswith("#")
