"""Writes a docstring as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from tools.website.fields import Fields, Paragraph, parts
from tools.website.markdown import inline


def as_markdown(docstring: str, types: Mapping[str, str] = {}) -> str:
    """Returns a docstring as Markdown: fields as a list, with their types, and indented paragraphs as Python."""
    blocks: list[str] = []
    for part in parts(docstring):
        if isinstance(part, Fields):
            named = ((", ".join(_typed(name, types) for name in names), text) for names, text in part.of)
            blocks.append("\n".join(f"- {names}: {inline(text)}" for names, text in named))
        elif _is_code(part) and blocks and blocks[-1].startswith("```"):
            blocks[-1] = blocks[-1].removesuffix("\n```") + f"\n\n{textwrap.dedent(part.text)}\n```"
        elif _is_code(part):
            blocks.append(f"```python\n{textwrap.dedent(part.text)}\n```")
        else:
            blocks.append(inline(part.text))
    return "\n\n".join(blocks)


def _typed(name: str, types: Mapping[str, str]) -> str:
    return f"`{name}: {types[name]}`" if name in types else f"`{name}`"


def _is_code(part: Paragraph) -> bool:
    return all(line.startswith("    ") for line in part.text.splitlines())
