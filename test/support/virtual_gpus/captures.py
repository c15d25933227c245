"""Captures of CUDA graphs, which other threads of the process can break.

A wait for all of a device breaks every capture. Calls that CUDA names potentially unsafe (to allocate, to free, to ask
or wait for an event or a stream) break one of the global mode, which is torch's, unless the calling thread has relaxed
its own mode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.virtual_gpus.journal import Journal

GLOBAL, RELAXED = 0, 2  # CU_STREAM_CAPTURE_MODE_*


class Captures:
    """Those of one process."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._thread, self._under_way = journal, threading.local(), 0

    def exchange_mode(self, mode: int) -> int:
        """As cuThreadExchangeStreamCaptureMode."""
        before, self._thread.mode = getattr(self._thread, "mode", GLOBAL), mode
        return before

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As torch.cuda.graph."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def conflicts(self, call: str) -> None:
        """The call breaks any capture."""
        if self._under_way:
            raise self._journal.broken(f"{call} was called while a graph was captured, and breaks the capture")

    def is_unsafe(self, call: str) -> None:
        """The call breaks captures, unless its thread has relaxed its mode."""
        if self._under_way and getattr(self._thread, "mode", GLOBAL) != RELAXED:
            raise self._journal.broken(
                f"{call} was called while a graph was captured, in a thread that had not relaxed its mode"
            )
