"""Runs a test that is a coroutine, under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread or process brings about; the scenario's deadline is the limit."""
    while not condition():
        await asyncio.sleep(0.001)
