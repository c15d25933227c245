"""Names that the trainer sends and no engine rank has a use for: misspelt, or meant to be left out?

A loader passes over what it does not know, and over what it knows and does not want (a tied head, a layer
for speculative decoding), without saying which. So the trainer says what it means to be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sglang_reshard.errors import Mismatch

_SHOWN = 5


def check_used(unused: Sequence[str], ignore: Sequence[str]) -> None:
    """Raise Mismatch unless each name that no engine rank uses matches one of the patterns in `ignore`."""
    mistaken = [name for name in unused if not any(fnmatchcase(name, pattern) for pattern in ignore)]
    if mistaken:
        raise Mismatch(
            f"{remark(mistaken)}: no rank's loader reads it. Correct the name, or if it is meant to be left out, "
            f"pass ignore=[{mistaken[0]!r}], patterns allowed, to the update"
        )


def remark(unused: Sequence[str]) -> str:
    """What the trainer is told of them; empty when there are none."""
    if not unused:
        return ""
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    return f"the engine has no use for {', '.join(unused[:_SHOWN])}{more}"
