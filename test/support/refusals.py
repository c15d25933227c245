"""What is said of an attempt that must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_reshard.errors import ReshardError


def refusal_of(attempt: Callable[[], Any]) -> list[str]:
    """The error's class and what it says; an empty class when there was none."""
    try:
        attempt()
    except ReshardError as error:
        return [type(error).__name__, str(error)]
    return ["", "it succeeded"]
