"""Parameters of tests that `make test-all` alone tries: those that show in other cases what one shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SWEEP = os.environ.get("SGLANG_RESHARD_SWEEP") == "1"


def sweep(*values: Any) -> Any:
    """One set of parameters that is tried under `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def only(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """All of them under `make test-all`, and else those that are `kept`."""
    return [c if kept(c) else sweep(*c) if isinstance(c, tuple) else sweep(c) for c in cases]


def examples(number: int) -> int:
    """How many examples hypothesis draws: all of them under `make test-all`, and else a quarter."""
    return number if SWEEP else -(-number // 4)
