"""What benchmarks take from the tests: processes that stand in for trainer ranks and engine ranks, and ports."""

from __future__ import annotations

import sys
from typing import Any

from benchmark.results import REPOSITORY


def run_world(*arguments: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Runs `support.world.run_world`, which the tests have, and their processes after it."""
    _find_tests()
    from support.world import run_world

    return run_world(*arguments, **options)


def free_port() -> int:
    """Returns a port for a server, which may take others up to 10,000 above it."""
    _find_tests()
    from support.servers import free_port

    return free_port()


def _find_tests() -> None:
    if str(REPOSITORY / "test") not in sys.path:
        sys.path.insert(0, str(REPOSITORY / "test"))
