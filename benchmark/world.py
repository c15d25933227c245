"""Processes that stand in for trainer ranks and engine ranks: those of the tests."""

from __future__ import annotations

import sys
from typing import Any

from benchmark.results import REPOSITORY


def run_world(*arguments: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Runs `support.world.run_world`, which the tests have, and their processes after it."""
    if str(REPOSITORY / "test") not in sys.path:
        sys.path.insert(0, str(REPOSITORY / "test"))
    from support.world import run_world

    return run_world(*arguments, **options)
