"""The result of one check. Needs no package that could be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output.

    status  "fail" if updates are impossible, "warning" if some uses are affected, else "ok"
    says    what was found
    cure    what to do; empty if nothing needs to be done
    """

    name: str
    status: Status
    says: str
    cure: str = ""


Check = Callable[[], list[Finding]]


def ok(name: str, says: str) -> list[Finding]:
    return [Finding(name, "ok", says)]


def warning(name: str, says: str, cure: str) -> list[Finding]:
    return [Finding(name, "warning", says, cure)]


def fail(name: str, says: str, cure: str) -> list[Finding]:
    return [Finding(name, "fail", says, cure)]
