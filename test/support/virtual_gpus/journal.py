"""What all processes did, in the order in which they did it, and the rules that they broke."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class RuleBroken(AssertionError):
    """A process did what real GPUs do not forgive."""


class Journal:
    """A file that every process appends lines to."""

    def __init__(self, folder: str, who: str) -> None:
        self._path = Path(folder, "journal")
        self.who = who

    def note(self, what: str, **details: Any) -> None:
        line = json.dumps({"who": self.who, "what": what, **details}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())  # at once, so that lines of several processes do not mix
        finally:
            os.close(descriptor)

    def broken(self, rule: str) -> RuleBroken:
        """Notes it, so that the test fails whatever becomes of the error. Returns the error, to be raised."""
        self.note("broken", rule=rule)
        return RuleBroken(f"{self.who}: {rule}")


def read(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "journal")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(folder: str) -> None:
    """Raises RuleBroken with all rules that were broken."""
    if broken := list(dict.fromkeys(f"{e['who']}: {e['rule']}" for e in of(read(folder), "broken"))):
        raise RuleBroken("\n".join(broken))


def of(entries: Iterable[dict[str, Any]], *what: str) -> list[dict[str, Any]]:
    return [e for e in entries if e["what"] in what]
