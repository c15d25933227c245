"""Writes pieces of Markdown."""

from __future__ import annotations

import re


def inline(text: str) -> str:
    """Returns text as one line, its stars and angle brackets escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"(?<!\\)([<*])", r"\\\1", p) for p in parts)


def cell(text: str) -> str:
    """Returns text for the cell of a table."""
    return inline(text).replace("|", "\\|")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table; cells are Markdown already."""
    lines = ["| " + " | ".join(head).rstrip() + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
