"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Status = Literal["ok", "warning", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line.

    status  "warning" for what harms some uses, "fail" for what makes updates impossible
    cure    what to do; empty where nothing is to be done
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
