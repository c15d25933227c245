"""Writes pieces of Markdown."""

from __future__ import annotations

import re

GENERATED = "<!-- Written by `python -m tools.website.pages` from the code; a test compares the two. -->"


def page(title: str, *blocks: str) -> str:
    """Returns a generated page of these blocks."""
    return "\n\n".join([f"# {title}", GENERATED, *(block.strip("\n") for block in blocks)]) + "\n"


def inline(text: str) -> str:
    """Returns text as one line, its stars and angle brackets escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"(?<!\\)([<*])", r"\\\1", p) for p in parts)


def cell(text: str) -> str:
    """Returns text for the cell of a table."""
    return inline(text).replace("|", "\\|")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table; cells are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
