"""MkDocs: makes pages of the repository's documents, where they are, so that a link is right here and there.

Every file that a page links is part of the site, results and examples among them. `home.md` takes the place of the
README. The navigation follows the folders; within one, pages are in the order in which its README links them, under the
README's headings.
"""

from __future__ import annotations

import json
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
sys.path.insert(0, str(REPOSITORY))  # of `tools`, here and for griffe_fields.py

from tools import marked  # noqa: E402

_ADDRESSES = {"RESHARDING_GUIDE.md": "guide/index.html", "docs/README.md": "documentation/index.html"}
_START = [
    "README.md", "RESHARDING_GUIDE.md", "docs/features.md", "docs/which-api.md", "docs/faq.md", "docs/alternatives.md",
]  # fmt: skip
_FOLDERS = {
    "Usage": "docs/usage", "Recipes": "docs/recipes", "Concepts": "docs", "Reference": "docs/reference",
    "Results": "docs/results",
}  # fmt: skip
_PROJECT = (
    "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "examples/http/README.md", "benchmark/README.md",
)  # fmt: skip
_HOME = "tools/website/home.md"
_MERMAID = "assets/mermaid.min.js"
_MERMAID_FILE = Path(sys.prefix, "mermaid.min.js")  # in the site's environment
_ENTRY = re.compile(r"^### \w+\n\n(<!-- \w+: begin -->\n.*?)^<!-- ::: ([\w.]+) -->$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
(_VERSION,) = re.findall(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
log = logging.getLogger("mkdocs.plugins.website")


def on_config(config: MkDocsConfig) -> None:
    config.copyright = f"sglang-reshard {_VERSION}, Apache-2.0"
    config.repo_name = f"sglang-reshard {_VERSION}"
    if not config.repo_url:
        config.edit_uri = None


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
    linked = {link for document in documents for link in _links(document, (REPOSITORY / document).read_text())}
    for uri in sorted(linked.difference(documents)):
        if (REPOSITORY / uri).is_file():
            found.append(_file(config, uri))
    for name in ("site.css", "logo.svg"):
        found.append(File.generated(config, f"assets/{name}", abs_src_path=str(REPOSITORY / "tools/website" / name)))
    if _MERMAID_FILE.exists():
        found.append(File.generated(config, _MERMAID, abs_src_path=str(_MERMAID_FILE)))
    else:
        log.info("%s is not there: pages with diagrams load mermaid from unpkg.com", _MERMAID_FILE)
    config.nav = _navigation()
    return found


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adds the blank line that Python-Markdown, unlike GitHub, needs between a paragraph and a list or a table.

    The home page quotes the README. Entries of api.md become directives of mkdocstrings.
    """
    markdown = re.sub("<!-- README: (.*) -->", lambda m: marked.read(REPOSITORY / "README.md", m[1]), markdown)
    markdown = _ENTRY.sub(_directive, markdown)
    if page.file.src_uri == "README.md":
        markdown = markdown.replace("VERSION", _VERSION)
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


def _directive(entry: re.Match[str]) -> str:
    """Shows of a class what its stub lists."""
    members = re.findall(r"^    def ([a-z]\w*)", entry[1], re.MULTILINE)
    return f"::: {entry[2]}\n    options: {{members: {json.dumps(members)}}}"


def _navigation() -> list[Any]:
    folders = [{title: _in_order(folder)} for title, folder in _FOLDERS.items()]
    return [{"Start": _START}, *folders, {"Project": list(_PROJECT)}]


def _in_order(folder: str) -> list[Any]:
    """Returns the documents of a folder: its README, those that each of its sections links, and then all others."""
    readme = f"{folder}/README.md"
    left = dict.fromkeys(uri for uri in _markdown_of(folder) if uri not in (readme, *_START))
    nav: list[Any] = [readme]
    first, *sections = re.split(r"^## ", (REPOSITORY / readme).read_text(), flags=re.MULTILINE)
    for section in sections or ["\n" + first]:
        title, _, body = section.partition("\n")
        linked = [uri for uri in dict.fromkeys(_links(readme, body)) if uri in left]
        left = {uri: None for uri in left if uri not in linked}
        nav += [{title: linked}] if title and linked else linked
    return [*nav, *left]


def _markdown_of(folder: str, within: str = "") -> list[str]:
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / folder).glob(f"{within}*.md"))


def _links(uri: str, text: str) -> Iterable[str]:
    """Yields the files of the repository that a document links in this text."""
    for target in _LINK.findall(text):
        path = (REPOSITORY / uri).parent.joinpath(target).resolve()
        if "://" not in target and path.is_relative_to(REPOSITORY):
            yield path.relative_to(REPOSITORY).as_posix()


def _file(config: MkDocsConfig, uri: str) -> File:
    file = File.generated(config, uri, abs_src_path=str(REPOSITORY / (_HOME if uri == "README.md" else uri)))
    file.generated_by = None  # it can be edited
    return file


def _begins(line: str) -> bool:
    """Whether a line begins a list or a table."""
    return re.match(r"\s*([-*] |\d+\. |\|)", line) is not None


def _continues(before: str, line: str) -> bool:
    """Whether the line before is of the same list or table."""
    if line.lstrip().startswith("|"):
        return before.lstrip().startswith("|")
    return _begins(before) or before.startswith(" ") or before.startswith("#")
