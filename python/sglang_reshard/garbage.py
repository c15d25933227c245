"""Pauses Python's garbage collector while many objects are made that are not garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while objects are made for every tensor.

    So many would trigger full collections of the process's heap, a quarter of a second each in a trainer or an engine,
    while every rank waits: at every update for (name, tensor) pairs, several times while a loader is traced.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
