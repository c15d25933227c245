"""Finds the descriptions of fields in this project's docstrings: names, two spaces, text that goes on indented.

name, other   what they are, which may go on
              in further lines
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*) {2,}(?P<text>\S.*)$")


class Paragraph(NamedTuple):
    """Text of a docstring, as it stands there."""

    text: str


class Fields(NamedTuple):
    """Adjacent fields: their names, and what is said of them."""

    of: tuple[tuple[tuple[str, ...], str], ...]


def parts(docstring: str) -> Iterator[Paragraph | Fields]:
    """Yields the paragraphs of a docstring (without its common indentation), and lists of fields, in their order."""
    for block in re.split(r"\n[ ]*\n", docstring.strip("\n")):
        lines = block.split("\n")
        start = next((i for i, line in enumerate(lines) if _HEAD.match(line)), None)
        if start is None:
            yield Paragraph(block)
            continue
        if start:
            yield Paragraph("\n".join(lines[:start]))
        yield Fields(tuple(_fields(lines[start:])))


def descriptions(docstring: str) -> dict[str, str]:
    """Returns field -> what is said of it."""
    lists = [part for part in parts(docstring) if isinstance(part, Fields)]
    return {name: text for part in lists for names, text in part.of for name in names}


def opening(docstring: str) -> str:
    """Returns the paragraphs before the first field, each as one line."""
    found = []
    for part in parts(docstring):
        if isinstance(part, Fields):
            break
        found.append(part.text)
    return "\n\n".join(found)


def _fields(lines: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    names: tuple[str, ...] = ()
    text: list[str] = []
    for line in lines:
        if head := _HEAD.match(line):
            if names:
                yield names, " ".join(text)
            names, text = tuple(head["names"].split(", ")), [head["text"].strip()]
        else:
            text.append(line.strip())
    yield names, " ".join(text)
