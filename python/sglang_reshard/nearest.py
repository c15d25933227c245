"""Names the known value that a misspelt one is most like, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: object, known: Iterable[str]) -> str:
    """Returns ". Did you mean 'p2p'?" for the end of an error; "" if no known value is like this one."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(value)[:100].lower(), by_lower, n=1, cutoff=0.5)
    return f". Did you mean {by_lower[found[0]]!r}?" if found else ""
