"""Threads that a test waits for."""

from __future__ import annotations

import threading
import time


def have_ended(name: str) -> bool:
    """Waits for the threads of this name. Returns whether all have ended in time."""
    end = time.monotonic() + 10
    while any(thread.name == name for thread in threading.enumerate()):
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True
