"""Checks values and names that a user spells, and names the known one that a misspelt one is most like."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from sglang_reshard.errors import Unsupported


def nearest(value: object, known: Iterable[str]) -> str:
    """Returns ". Did you mean 'p2p'?" for the end of an error; "" if no known value is like this one."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(value)[:100].lower(), by_lower, n=1, cutoff=0.5)
    return f". Did you mean {by_lower[found[0]]!r}?" if found else ""


def not_one_of(what: str, value: object, known: Collection[str]) -> str:
    """Returns the error for a value that is not known, with all known values. what: names it, and quotes it"""
    return f"{what} is not one of: {', '.join(known)}{nearest(value, known)}"


def check_one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raises Unsupported, with all known values, for another one."""
    if value not in known:
        raise Unsupported(
            f"{name}={value!r} is not supported; use {' or '.join(map(repr, known))}{nearest(value, known)}"
        )


def check_names(
    what: str, given: Iterable[str], known: Collection[str], elsewhere: Collection[str] = (), where: str = ""
) -> None:
    """Raises TypeError, as Python does for keyword arguments, for a name that is not known.

    what       what the names are of: "a sender"
    elsewhere  names that another call takes
    where      that call, as the error says it
    """
    for name in given:
        if name in elsewhere and name not in known:
            raise TypeError(f"{name!r} is no option of {what}, but of {where}")
        if name not in known:
            raise TypeError(f"{name!r} is no option of {what}; they are {', '.join(known)}{nearest(name, known)}")
