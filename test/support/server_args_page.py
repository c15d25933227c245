"""The lists of SGLang's options in docs/server-args.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "server-args.md"


def listed() -> dict[str, list[str]]:
    """Options by the heading of their list: lines of nothing but names."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif re.fullmatch(r"(`\w+` ?)+", line):
            found.setdefault(heading, []).extend(re.findall(r"`(\w+)`", line))
    return found
