"""Work that a thread has given to GPUs, for another thread to wait for.

A wait for a whole device breaks every capture of a CUDA graph that is under way in the process. A wait for an event
that was recorded outside of the capture does not.
"""

from __future__ import annotations

from typing import Any

from sglang_reshard.gpu.runtime import runtime


class RecordedWork:
    """All that the current streams of a thread had been given when `record` was called in it."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def record(self) -> None:
        self._events = [runtime().event(device) for device in runtime().used_devices()]

    def wait(self) -> None:
        """Returns once it has ended. May be called in any thread."""
        for event in self._events:
            event.synchronize()
