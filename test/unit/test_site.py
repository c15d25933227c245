"""What the site of the documents needs of them; `make docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, blocks
from tools.website.docstrings import as_markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "mermaid")])
def test_a_diagram_has_no_semicolon(document: str) -> None:
    """It ends a statement of mermaid's, and the rest of the line is an error where the diagram should be."""
    assert [line for body in blocks(document, "mermaid") for line in body.splitlines() if ";" in line] == []


def test_the_packages_of_the_site_are_pinned_one_by_one() -> None:
    """They are installed without resolving."""
    (listed,) = re.findall(r"^MKDOCS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    packages = listed.replace("\\\n", " ").split()
    assert len(packages) > 30
    assert [package for package in packages if not re.fullmatch(r"[a-z0-9-]+==[\d.]+(post\d+)?", package)] == []


def test_a_docstring_has_its_fields_as_a_list_and_its_code_as_code() -> None:
    docstring = (
        "Sends *all*.\n\n    send(1)\n\n    send(2)\n\nfirst, second   of a|b\n                <name>\n\nRaises `X`."
    )
    code = "```python\nsend(1)\n\nsend(2)\n```"
    assert as_markdown(docstring).split("\n\n", 1)[0] == "Sends \\*all\\*."
    assert as_markdown(docstring, {"first": "int"}).endswith(
        f"{code}\n\n- `first: int`, `second`: of a|b \\<name>\n\nRaises `X`."
    )
