"""mkdocstrings: shows this project's docstrings, their lists of fields and indented code, as Markdown."""

from __future__ import annotations

from typing import Any

import griffe

from tools.website.docstrings import as_markdown


class FieldLists(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
