"""Shortens lists of names in errors and remarks."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 5


def some_names(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"
