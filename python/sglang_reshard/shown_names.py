"""Shortens lists of names in errors and remarks."""

from __future__ import annotations

from collections.abc import Sequence


def some_names(names: Sequence[str], most: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
