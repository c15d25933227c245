"""Writes and reads generated text between two comments of a Markdown file."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, name: str, text: str) -> None:
    """Puts `text` between `<!-- name: begin -->` and `<!-- name: end -->`."""
    before, rest = path.read_text().split(_begin(name))
    after = rest.split(_end(name))[1]
    path.write_text(f"{before}{_begin(name)}\n{text}\n{_end(name)}{after}")


def read(path: Path, name: str) -> str:
    return path.read_text().split(_begin(name))[1].split(_end(name))[0].strip("\n")


def _begin(name: str) -> str:
    return f"<!-- {name}: begin -->"


def _end(name: str) -> str:
    return f"<!-- {name}: end -->"
