"""Threads that a test waits for."""

from __future__ import annotations

import threading
import time


def have_ended(name: str, within_s: float = 10.0) -> bool:
    """Waits for the threads of this name. Returns whether all have ended in time."""
    end = time.monotonic() + within_s
    while any(thread.name == name for thread in threading.enumerate()):
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


class Ticks:
    """A thread that wakes up all the time, within a `with` block.

    longest_s  for how long it has not run: the process, or all of its threads, stood still
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._end.wait(0.005):
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now
        self.longest_s = max(self.longest_s, time.monotonic() - last)
